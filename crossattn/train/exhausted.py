"""What the system ran out of, when that is what an error comes from."""

import errno

_FULL_DISK = ("no space left", "file too large", "quota exceeded")
_TOO_MANY_OPEN = ("too many open files",)
_NUMBERS = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), _TOO_MANY_OPEN),
    **dict.fromkeys((errno.ENOSPC, errno.EFBIG, errno.EDQUOT), _FULL_DISK),
}


def exhausted(error: BaseException | None) -> str | None:
    """In a few words what ran out, somewhere behind this error; None where nothing did.

    A disk, a quota, a limit on the size of files or on how many are open.
    """
    while error is not None:
        text = str(error).lower()
        kind = _NUMBERS.get(error.errno) if isinstance(error, OSError) and error.errno else None
        if kind is _TOO_MANY_OPEN or any(word in text for word in _TOO_MANY_OPEN):
            return "too many files are open at once; allow more (ulimit -n)"
        if kind is _FULL_DISK or any(word in text for word in _FULL_DISK):
            return "the disk is full or a file grew over its limit; make room"
        error = error.__cause__ or error.__context__
    return None
