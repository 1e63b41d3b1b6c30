"""Both ends of the protocol between workers and parameter servers."""
