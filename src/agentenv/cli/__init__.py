"""The `aenv` command."""
