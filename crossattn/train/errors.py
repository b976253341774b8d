"""Errors that a person can act on: one sentence each; launchers print it and exit with code 2."""


class TrainError(Exception):
    """Anything training refuses or cannot go on with; the message is meant to be shown as it is."""


class WorkdirMismatch(TrainError):
    """The work directory was made by another config."""


class WorkdirBusy(TrainError):
    """Another process is training in the work directory."""


class NonFiniteLoss(TrainError):
    """The loss or its gradient became NaN or infinite."""


class CheckpointError(TrainError):
    """A checkpoint could not be written, found or read."""


class MissingPackage(TrainError):
    """An optional package that was asked for is not installed."""


class JoinError(TrainError):
    """The processes of one run did not find each other."""
