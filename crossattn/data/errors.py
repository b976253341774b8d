"""The ways in which data can fail: they are wrong, all or one value of them, or they are not here."""


class DataError(ValueError):
    """The data or the request for it is wrong; the message names file and line, or the option."""


class Unreadable(DataError):
    """One value cannot be read, and its example can be left out."""


class DataUnavailable(RuntimeError):
    """The data is not on this machine; the message says which file to put where."""
