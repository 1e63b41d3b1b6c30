"""Exchange of gradients and models between workers, and with parameter servers."""
