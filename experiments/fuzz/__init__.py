"""Random use, damaged files and hostile settings, held to what the library promises.

One file a part. A part has ``ABOUT``, the packages it ``NEEDS``, the ``ENVIRONMENT`` of its process and
``start(folder)``, which gives a function of a random generator: one case, which raises ``Wrong`` where a
promise is broken. Any other exception is a finding too. Case number n draws from ``default_rng(n)``, so a
number is all it takes to see a finding again.
"""

PARTS = ("masks", "meshes", "checkpoints", "configs", "files", "generation")


class Wrong(AssertionError):
    """A promise is not kept; the message says on what and how."""
