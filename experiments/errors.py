"""What launchers tell their users in one line."""


class SettingsError(ValueError):
    """A config holds a key or a value that does not fit."""
