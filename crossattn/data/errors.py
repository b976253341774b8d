"""The two ways in which data can fail: it is wrong, or it is not here."""


class DataError(ValueError):
    """The data or the request for it is wrong; the message names file and line, or the option."""


class DataUnavailable(RuntimeError):
    """The data is not on this machine; the message says which file to put where."""
