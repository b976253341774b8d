"""Files that are fetched from the hub, by a stand-in for ``huggingface_hub`` that lists them."""

import fnmatch
import inspect
import shutil
import sys
from types import ModuleType

import pytest

import crossattn as xa
from crossattn.weights import CheckpointError
from tests.peers import package
from tests.weights import checkpoints
from tests.weights.test_round_trip import files


class Hub(ModuleType):
    """A hub of one repository, ``someone/model``, and a folder into which its files are fetched."""

    def __init__(self, repository, folder):
        super().__init__("huggingface_hub")
        self.repository, self.folder, self.online = repository, folder, True

    def list_repo_files(self, name):
        if not self.online:
            raise ConnectionError("no network\nat all")
        if name != "someone/model":
            raise ValueError(f"no repository {name}\n(a long explanation)")
        return files(self.repository)

    def snapshot_download(self, name, allow_patterns=(), local_files_only=False):
        if local_files_only:
            if not self.folder.exists():
                raise FileNotFoundError("nothing was fetched before")
            return str(self.folder)
        for file in self.list_repo_files(name):
            if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                target = self.folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.repository / file, target)
        return str(self.folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    found = Hub(checkpoints.fresh(checkpoints.BERT, tmp_path / "repository"), tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "huggingface_hub", found)
    return found


def add(hub, *names):
    for name in names:
        (hub.repository / name).parent.mkdir(exist_ok=True)
        (hub.repository / name).write_bytes(b"")


def test_weights_come_once_and_nothing_from_other_folders(hub):
    (hub.repository / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    add(hub, "model.fp16.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin")
    add(hub, "tf_model.h5", "onnx/model.safetensors", "onnx/config.json", "README.md")
    _, params, tokenizer = xa.load("someone/model")
    assert files(hub.folder) == ["config.json", "model.safetensors", "vocab.txt"]
    assert params and tokenizer.encode("the").ids == [2, 4, 3]


def test_all_parts_come_where_there_are_parts_only(hub):
    checkpoints.shard(hub.repository)
    add(hub, "model-00001-of-00003.fp16.safetensors", "consolidated.safetensors")
    _, params, _ = xa.load("someone/model")
    parts = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert params and files(hub.folder) == ["config.json", *parts, "model.safetensors.index.json"]


def test_pickles_alone_are_refused_before_they_come(hub):
    (hub.repository / "model.safetensors").rename(hub.repository / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as raised:
        xa.load("someone/model")
    for said in (
        "someone/model has only pytorch_model.bin, a pickle",
        "then load model",
        't.BertForPreTraining.from_pretrained("someone/model").save_pretrained("model")',
        't.AutoTokenizer.from_pretrained("someone/model").save_pretrained("model")',
    ):
        assert said in str(raised.value)
    assert files(hub.folder) == ["config.json"]


def test_the_stand_in_is_asked_as_the_client_is():
    client = package("huggingface_hub", "hub")
    inspect.signature(client.list_repo_files).bind("someone/model")
    download = inspect.signature(client.snapshot_download)
    download.bind("someone/model", allow_patterns=["config.json"])
    download.bind("someone/model", local_files_only=True)


def test_without_a_network_what_was_fetched_is_found_and_the_rest_refused_in_a_sentence(hub):
    match = "nor to be had from the hub: no repository some/other$"
    with pytest.raises(CheckpointError, match=match):
        xa.load("some/other")
    hub.online = False
    with pytest.raises(CheckpointError, match="nor to be had from the hub: no network$"):
        xa.load("someone/model")
    hub.online = True
    xa.load("someone/model")
    hub.online = False
    assert xa.load("someone/model")[1]
