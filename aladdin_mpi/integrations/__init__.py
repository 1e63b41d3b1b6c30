"""Entry points for scripts written for other libraries."""
