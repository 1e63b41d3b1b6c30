"""How workers exchange gradients and models: with parameter servers, or with each other."""
