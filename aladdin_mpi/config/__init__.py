"""Options: declared, read, checked, resumed, agreed on."""
