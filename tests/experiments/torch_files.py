"""Writes a dict of tensors as PyTorch does, without PyTorch: a zip of a pickle and of raw numbers."""

import zipfile

import numpy as np


def write(path, tensors, asks_for="torch._utils _rebuild_tensor_v2", shared=False):
    """``asks_for``: the function, module and name, that each tensor is made with.

    ``shared``: all have the numbers of the first.
    """
    program = [b"\x80\x02ccollections\nOrderedDict\n)R("]
    with zipfile.ZipFile(path, "w") as archive:
        for number, (name, tensor) in enumerate(tensors.items()):
            key = 0 if shared else number
            program += [
                _text(name) + b"c" + "\n".join(asks_for.split()).encode() + b"\n((",
                _text("storage") + b"ctorch\nFloatStorage\n" + _text(str(key)) + _text("cuda:0"),
                _number(tensor.size) + b"tQK\0",
                _tuple(tensor.shape) + _tuple(n // 4 for n in tensor.strides),
                b"\x89ccollections\nOrderedDict\n)RtR",
            ]
            if key == number:
                archive.writestr(f"archive/data/{key}", tensor.astype("<f4").tobytes("A"))
        # As in a state dict, the dict has an attribute.
        end = b"u}" + _text("_metadata") + b"}sb."
        archive.writestr("archive/data.pkl", b"".join(program) + end)
    return path


def _text(text):
    return b"X" + np.uint32(len(text.encode())).tobytes() + text.encode()


def _number(number):
    return b"J" + np.int32(number).tobytes()


def _tuple(numbers):
    return b"(" + b"".join(map(_number, numbers)) + b"t"
