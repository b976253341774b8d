"""Configs: values only. Each file's ``get_config(arg)`` returns a ConfigDict; arg "tiny" runs in seconds."""
