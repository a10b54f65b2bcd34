"""Names of weights: fetched once, whole and as expected, or a clear error.

A server on this machine stands in for the network.
"""

import dataclasses
import hashlib
import http.server
import json
import pathlib
import socket
import threading
import types

import huggingface_hub
import pytest
from etils import epath
from huggingface_hub import constants

from vit_jax.weights import catalog, resolve

CONTENT = bytes(range(256)) * 64
SHA256 = hashlib.sha256(CONTENT).hexdigest()
COMMIT = "a" * 40


class Server(http.server.ThreadingHTTPServer):
  """Serves `files` by path and notes each request.

  Attributes:
    files: content by path.
    seen: (method, path) of each request.
    lost: bytes that are missing at the end of each answer.
    url: its address.
  """

  def __init__(self):
    super().__init__(("127.0.0.1", 0), Handler)
    self.files, self.seen, self.lost = {}, [], 0
    self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
  server: Server

  def do_GET(self):
    self.server.seen.append((self.command, self.path))
    found = self.server.files.get(self.path.partition("?")[0])
    content = found or b""
    self.send_response(404 if found is None else 200)
    self.send_header("Content-Length", str(len(content)))
    self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
    self.send_header("X-Repo-Commit", COMMIT)
    if found is None:
      self.send_header("X-Error-Code", "RepoNotFound")
    self.end_headers()
    if self.command == "GET":
      self.wfile.write(content[: len(content) - self.server.lost])

  do_HEAD = do_GET

  def log_message(self, format, *args):
    pass


@pytest.fixture
def server():
  with Server() as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """Returns the folder that is the cache of this test."""
  monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
  return tmp_path / "cache"


@pytest.fixture
def closed_port():
  """Returns the address of a server that is not there."""
  with socket.socket() as taken:  # Bound, but nobody listens.
    taken.bind(("127.0.0.1", 0))
    yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def files_in(folder):
  files = pathlib.Path(folder).rglob("*")
  return sorted(x.name for x in files if x.is_file())


# Local paths.


def test_a_local_file_or_folder_is_itself(tmp_path, monkeypatch):
  (tmp_path / "a.npz").write_bytes(CONTENT)
  monkeypatch.setenv("HOME", str(tmp_path))
  assert resolve.resolve(tmp_path / "a.npz") == epath.Path(tmp_path / "a.npz")
  assert resolve.resolve("~/a.npz") == epath.Path(tmp_path / "a.npz")
  assert resolve.resolve(str(tmp_path)) == epath.Path(tmp_path)


def test_a_part_after_the_file_is_split_off(tmp_path):
  (tmp_path / "a.npz").write_bytes(CONTENT)
  name = f"{tmp_path}/a.npz:img"
  assert resolve.split_part(name) == (f"{tmp_path}/a.npz", "img")
  assert resolve.split_part("hf-hub:a/b") == ("hf-hub:a/b", "")
  assert resolve.split_part("gs://a/b.npz") == ("gs://a/b.npz", "")
  assert resolve.resolve(name) == epath.Path(tmp_path / "a.npz")


def test_a_local_file_of_another_checksum_is_refused_and_kept(tmp_path):
  (tmp_path / "a.npz").write_bytes(CONTENT)
  assert resolve.resolve(tmp_path / "a.npz", sha256=SHA256.upper())
  with pytest.raises(
    ValueError, match=f"got {SHA256} for .*expected {'0' * 64}"
  ):
    resolve.resolve(tmp_path / "a.npz", sha256="0" * 64)
  assert files_in(tmp_path) == ["a.npz"]
  with pytest.raises(ValueError, match="only a file has one"):
    resolve.resolve(tmp_path, sha256=SHA256)


@pytest.mark.parametrize("name", ["", "vit_b16_augreg_in21k", "s3://a/b.npz"])
def test_an_unknown_name_is_an_error_that_lists_what_a_name_can_be(name):
  with pytest.raises(
    ValueError, match=r"there is no such file .* hf-hub:OWNER"
  ):
    resolve.resolve(name)


def test_an_unknown_name_gets_the_closest_of_the_catalog():
  with pytest.raises(
    ValueError, match=r"mean vit_base_patch16_224.augreg_in21k"
  ):
    resolve.resolve("vit_b16_augreg_in21k")


# URLs.


def test_a_url_is_fetched_once(server, cache):
  server.files["/m/a.npz"] = CONTENT
  path = resolve.resolve(f"{server.url}/m/a.npz?download=1", sha256=SHA256)
  assert path.name == "a.npz"
  assert path.read_bytes() == CONTENT
  again = resolve.resolve(f"{server.url}/m/a.npz?download=1", sha256=SHA256)
  assert again == path
  assert len(server.seen) == 1
  assert files_in(cache) == ["a.npz"]


def test_the_cache_can_be_given(server, cache, tmp_path):
  server.files["/a.npz"] = CONTENT
  path = resolve.resolve(f"{server.url}/a.npz", cache=tmp_path / "mine")
  assert (tmp_path / "mine") in pathlib.Path(path).parents
  assert not cache.exists()


def test_urls_that_end_alike_do_not_share_a_file(server, cache):
  server.files |= {"/a/x.npz": b"1", "/b/x.npz": b"2"}
  first = resolve.resolve(f"{server.url}/a/x.npz")
  second = resolve.resolve(f"{server.url}/b/x.npz")
  assert (first.read_bytes(), second.read_bytes()) == (b"1", b"2")


def test_a_download_of_another_checksum_is_removed(server, cache):
  server.files["/a.npz"] = CONTENT
  with pytest.raises(ValueError, match=f"sha256: .*{'0' * 64}.*{SHA256}"):
    resolve.resolve(f"{server.url}/a.npz", sha256="0" * 64)
  assert files_in(cache) == []


def test_a_damaged_file_in_the_cache_is_fetched_again(server, cache):
  server.files["/a.npz"] = CONTENT
  path = resolve.resolve(f"{server.url}/a.npz")
  path.write_bytes(b"damaged")
  assert resolve.resolve(f"{server.url}/a.npz", sha256=SHA256) == path
  assert path.read_bytes() == CONTENT


def test_a_download_that_breaks_off_leaves_nothing(server, cache):
  server.files["/a.npz"] = CONTENT
  server.lost = 1000
  with pytest.raises(ValueError, match=r"the download failed \(.*Read"):
    resolve.resolve(f"{server.url}/a.npz")
  assert files_in(cache) == []


def test_an_answer_of_the_server_is_said(server, cache):
  with pytest.raises(ValueError, match=r"answers 404.*lay it at .*a\.npz"):
    resolve.resolve(f"{server.url}/a.npz")
  assert files_in(cache) == []


def test_without_a_network_the_error_says_what_to_do(closed_port, cache):
  with pytest.raises(
    ValueError,
    match=r"a\.npz.*127.0.0.1:\d+ cannot be reached.*on another machine.*cache",
  ):
    resolve.resolve(f"{closed_port}/a.npz")


def test_an_address_that_is_none_is_an_error(cache):
  with pytest.raises(ValueError, match=r"could not be fetched: .*Invalid URL"):
    resolve.resolve("https:///a.npz")


def test_a_file_laid_into_the_cache_by_hand_is_found(closed_port, cache):
  with pytest.raises(ValueError, match="lay it at") as error:
    resolve.resolve(f"{closed_port}/a.npz")
  place = pathlib.Path(str(error.value).rpartition("lay it at ")[2][:-1])
  place.parent.mkdir(parents=True, exist_ok=True)
  place.write_bytes(CONTENT)
  assert resolve.resolve(f"{closed_port}/a.npz") == epath.Path(place)


def test_a_name_of_the_catalog_has_its_address_and_checksum(
  server, cache, monkeypatch
):
  server.files["/b.npz"] = CONTENT
  (entry,) = catalog.find("imagenet21k/ViT-B_16")
  entry = dataclasses.replace(entry, where=f"{server.url}/b.npz", sha256=SHA256)
  monkeypatch.setattr(catalog, "entries", lambda: (entry,))
  assert resolve.resolve("imagenet21k/ViT-B_16").read_bytes() == CONTENT
  entry = dataclasses.replace(entry, sha256="0" * 64)
  with pytest.raises(ValueError, match="sha256"):
    resolve.resolve("imagenet21k/ViT-B_16")


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
  def missing(name):
    raise ImportError(name)

  monkeypatch.setattr(resolve.importlib, "import_module", missing)
  with pytest.raises(ImportError, match=r"needs pooch. Run .*-e .\.\[hub\]."):
    resolve.resolve("https://example.org/a.npz", cache=tmp_path)
  with pytest.raises(ImportError, match="needs huggingface_hub"):
    resolve.resolve("hf-hub:a/b", cache=tmp_path)


# Buckets.


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  """Returns the local folder that stands in for gs://bucket."""
  folder = tmp_path / "bucket"
  folder.mkdir()

  def path(name):
    return epath.Path(str(name).replace("gs://bucket", str(folder)))

  fake = types.SimpleNamespace(Path=path, PathLike=epath.PathLike)
  monkeypatch.setattr(resolve, "epath", fake)
  return folder


def test_a_file_of_a_bucket_is_copied_once(bucket, cache):
  (bucket / "a.npz").write_bytes(CONTENT)
  path = resolve.resolve("gs://bucket/a.npz", sha256=SHA256)
  assert path.read_bytes() == CONTENT
  assert cache in pathlib.Path(path).parents
  with pytest.raises(ValueError, match="sha256"):
    resolve.resolve("gs://bucket/a.npz", sha256="0" * 64)


def test_a_folder_of_a_bucket_is_copied_without_its_pickles(bucket, cache):
  for name in ("model.safetensors", "config.json", "pytorch_model.bin"):
    (bucket / name).write_bytes(CONTENT)
  path = resolve.resolve("gs://bucket/")
  assert files_in(path) == ["config.json", "model.safetensors"]


def test_a_checkpoint_in_a_bucket_stays_where_it_is(bucket, cache):
  (bucket / "config.json").write_bytes(b"{}")
  assert resolve.resolve("gs://bucket") == epath.Path(bucket)
  assert not cache.exists()


def test_a_bucket_without_the_file_is_an_error(bucket):
  with pytest.raises(ValueError, match="there is no such file"):
    resolve.resolve("gs://bucket/b.npz")


def test_a_bucket_without_gcsfs_says_how_to_reach_it(monkeypatch):
  def missing(self):
    raise ImportError("Please install gcsfs")

  monkeypatch.setattr(type(epath.Path("gs://a/b")), "is_dir", missing)
  with pytest.raises(
    ImportError,
    match=r"pip install 'etils\[epath-gcs\]'.*https://storage.googleapis.com/a/b",
  ):
    resolve.resolve("gs://a/b")


# The hub.


@pytest.fixture
def hub(server, monkeypatch):
  """Returns a function that fills the fake hub with one repository."""
  monkeypatch.setattr(constants, "ENDPOINT", server.url)
  template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
  monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

  def fill(repository, *names, revision="main"):
    info = {"id": repository, "sha": COMMIT}
    tree = [{"type": "file", "path": name, "size": 1} for name in names]
    tree = [file | {"oid": "0" * 40} for file in tree]
    api = f"/api/models/{repository}"
    server.files[f"{api}/revision/{revision}"] = json.dumps(info).encode()
    server.files[f"{api}/tree/{COMMIT}"] = json.dumps(tree).encode()
    for name in names:
      server.files[f"/{repository}/resolve/{COMMIT}/{name}"] = CONTENT

  return fill


NAMES = ("model.safetensors", "config.json", "pytorch_model.bin", "vit.pt")


@pytest.mark.parametrize(
  ("name", "repository"),
  [
    ("hf-hub:owner/vit", "owner/vit"),
    ("timm/vit_tiny.x_in1k", "timm/vit_tiny.x_in1k"),
    ("hf-hub:owner/vit@v2", "owner/vit"),
  ],
)
def test_a_hub_gives_arrays_and_json_but_no_pickle(
  name, repository, hub, server, tmp_path
):
  hub(repository, *NAMES, revision=name.partition("@")[2] or "main")
  path = resolve.resolve(name, cache=tmp_path)
  assert files_in(path) == ["config.json", "model.safetensors"]
  assert (path / "model.safetensors").read_bytes() == CONTENT
  assert not [p for _, p in server.seen if p.endswith((".bin", ".pt"))]


def test_a_repository_is_found_in_the_cache_without_the_hub(
  hub, server, tmp_path, closed_port, monkeypatch
):
  hub("owner/vit", *NAMES)
  path = resolve.resolve("hf-hub:owner/vit", cache=tmp_path)
  monkeypatch.setattr(constants, "ENDPOINT", closed_port)
  assert resolve.resolve("hf-hub:owner/vit", cache=tmp_path) == path


def test_a_repository_of_pickles_only_is_an_error(hub, tmp_path):
  hub("owner/vit", "config.json", "pytorch_model.bin")
  with pytest.raises(ValueError, match=r"has no \.safetensors.*can run code"):
    resolve.resolve("hf-hub:owner/vit", cache=tmp_path)


def test_a_repository_has_no_one_checksum(hub, tmp_path):
  hub("owner/vit", *NAMES)
  with pytest.raises(ValueError, match="only a file has one"):
    resolve.resolve("hf-hub:owner/vit", cache=tmp_path, sha256=SHA256)


def test_a_repository_that_is_not_there_gets_the_closest_name(hub, tmp_path):
  with pytest.raises(ValueError, match=r"does not give it.* mean google/vit-b"):
    resolve.resolve("hf-hub:google/vit-base-16-224", cache=tmp_path)


@pytest.mark.parametrize("name", ["hf-hub:a/b/c", "hf-hub:"])
def test_what_is_no_name_of_a_repository_is_an_error(name, tmp_path):
  with pytest.raises(ValueError, match="does not give it"):
    resolve.resolve(name, cache=tmp_path)


def test_without_the_hub_the_error_says_what_to_do(
  closed_port, tmp_path, monkeypatch
):
  monkeypatch.setattr(constants, "ENDPOINT", closed_port)
  with pytest.raises(
    ValueError,
    match=r"in the cache, and http://127.* cannot be reached.*HF_HUB_OFFLINE"
    r".*on another machine",
  ):
    resolve.resolve("timm/vit_base_patch16_224.augreg_in21k", cache=tmp_path)


def test_the_hub_is_not_asked_when_told_to_be_offline(
  hub, server, tmp_path, monkeypatch
):
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  assert huggingface_hub.is_offline_mode()
  with pytest.raises(
    ValueError, match=r"cannot be reached: .*offline mode is enabled"
  ):
    resolve.resolve("hf-hub:owner/vit", cache=tmp_path)
  assert server.seen == []
