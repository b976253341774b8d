"""Errors that launchers print in one line."""


class SettingsError(ValueError):
    """A wrong key or value of a config."""
