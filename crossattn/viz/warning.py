"""The warning of pictures, without matplotlib."""


class GlyphWarning(UserWarning):
    """No font on this machine has some characters; they are drawn as their U+ codes."""
