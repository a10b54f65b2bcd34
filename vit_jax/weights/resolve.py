"""From a name to a local file or folder: paths, URLs, buckets and hubs.

  ViT-B_16.npz, ~/models/vit                  a file or folder here
  https://example.org/ViT-B_16.npz            http too
  gs://vit_models/imagenet21k/ViT-B_16.npz    needs gcsfs
  hf-hub:google/vit-base-patch16-224          at a revision with @main
  timm/vit_base_patch16_224.augreg_in21k      timm's on the same hub
  imagenet21k/ViT-B_16                        a name of the catalog

What was fetched once is not fetched again. Only arrays and JSON are fetched,
never pickled files, which can run code when they are read.
"""

import hashlib
import importlib
import os
import re
import urllib.parse
from collections.abc import Callable
from typing import Any

from etils import epath

from vit_jax.weights import catalog

_ELSEWHERE = "Or fetch it on another machine, and give the path of the copy"


def resolve(
  name: epath.PathLike,
  *,
  cache: epath.PathLike | None = None,
  sha256: str | None = None,
) -> epath.Path:
  """Returns the file or folder of a name, after fetching it if need be.

  Args:
    name: see above. A part after the file, as in "a.npz:img", is ignored here;
      see `split_part`.
    cache: folder to keep what is fetched in. If None, that of Hugging Face's
      own library for its hub; for others $VIT_JAX_CACHE, or else
      ~/.cache/vit_jax/weights.
    sha256: checksum, in hexadecimal, that the file must have; that of the
      catalog, if it has one, if None.

  Returns:
    A local path; or the same path for a folder in a bucket without
    .safetensors files, such as a checkpoint, which is read where it is.

  Raises:
    ValueError: if there is no such thing, it cannot be fetched, or its
      checksum is another one.
    ImportError: if what is needed to fetch it is not installed.
  """
  text, _ = split_part(name)
  if text and "://" not in text:
    path = epath.Path(text).expanduser()
    if path.exists():
      return _checked(path, sha256)
  known = {entry.name: entry for entry in catalog.entries()}
  if text in known:
    text, sha256 = known[text].where, sha256 or known[text].sha256
  if re.match("https?://", text):
    return _download(text, _target(text, cache), sha256)
  if text.startswith("gs://"):
    return _from_bucket(text, cache, sha256)
  if text.startswith(("hf-hub:", "timm/")):
    return _checked(_from_hub(text, cache), sha256)
  raise ValueError(
    f"weights: got {text!r}; there is no such file or folder, and no published "
    f"file of that name.{catalog.closest(text)} Give a path, https://, gs://, "
    "hf-hub:OWNER/NAME, timm/NAME, or a name of `python -m vit_jax.weights "
    "list`."
  )


def split_part(name: epath.PathLike) -> tuple[str, str]:
  """Returns ("a.npz", "img") of "a.npz:img", and ("a.npz", "") of "a.npz"."""
  text = os.fspath(name)
  match = re.fullmatch(r"(.+\.npz):([\w/]+)", text)
  return (match[1], match[2]) if match else (text, "")


def _checked(path: epath.Path, sha256: str | None) -> epath.Path:
  """Returns the path, once its checksum is known to be right."""
  if not sha256:
    return path
  if path.is_dir():
    raise ValueError(
      f"sha256: got {sha256!r} for the folder {str(path)!r}; only a file has "
      "one. Leave it out."
    )
  with open(path, "rb") as file:
    found = hashlib.file_digest(file, "sha256").hexdigest()
  if found != sha256.lower():
    raise ValueError(
      f"sha256: got {found} for {str(path)!r}; expected {sha256}. Get the file "
      "again."
    )
  return path


def _target(url: str, cache: epath.PathLike | None) -> epath.Path:
  """Returns where in the cache a file or folder lies, under its own name."""
  default = os.environ.get("VIT_JAX_CACHE") or "~/.cache/vit_jax/weights"
  folder = epath.Path(cache or default).expanduser()
  name = urllib.parse.urlsplit(url).path.rstrip("/").rpartition("/")[2]
  return folder / hashlib.sha256(url.encode()).hexdigest()[:16] / name


def _download(
  url: str,
  target: epath.Path,
  sha256: str | None,
  downloader: Callable[[str, str, Any], None] | None = None,
) -> epath.Path:
  """Returns `target` with the content of `url`; a broken one is never there."""
  pooch = _import("pooch")
  requests = _import("requests")  # Which pooch uses.
  try:
    pooch.retrieve(
      *(url, f"sha256:{sha256}" if sha256 else None),
      fname=target.name,
      path=target.parent,
      downloader=downloader,
      progressbar=downloader is None,
    )
  except requests.HTTPError as error:
    why = f"the server answers {error.response.status_code}"
    raise _not_fetched(url, target, why) from None
  except (requests.ConnectionError, requests.Timeout) as error:
    host = urllib.parse.urlsplit(url).netloc
    why = f"{host} cannot be reached ({type(error).__name__})"
    raise _not_fetched(url, target, why) from None
  except requests.RequestException as error:
    why = f"the download failed ({error})"
    raise _not_fetched(url, target, why) from None
  except ValueError as error:  # Pooch's for another checksum.
    raise ValueError(
      f"sha256: {url}: {error} If the file has changed, give its new checksum."
    ) from None
  return target


def _not_fetched(url: str, target: epath.Path, why: str) -> ValueError:
  return ValueError(
    f"weights: got {url!r}, which could not be fetched: {why}. Check the "
    f"address and the network. {_ELSEWHERE}, or lay it at {target}."
  )


def _from_bucket(
  url: str, cache: epath.PathLike | None, sha256: str | None
) -> epath.Path:
  """Returns a local copy of a file, or of a folder of safetensors."""
  source = epath.Path(url)
  try:
    is_folder, there = source.is_dir(), source.exists()
  except ImportError:
    raise ImportError(
      f"weights: got {url!r}; gs:// needs gcsfs. Run pip install "
      "'etils[epath-gcs]'; or, if the bucket is public, give "
      f"https://storage.googleapis.com/{url.removeprefix('gs://')}"
    ) from None
  if not there:
    raise ValueError(
      f"weights: got {url!r}; there is no such file. Check the address."
    )
  target = _target(url, cache)
  if not is_folder:
    return _download(url, target, sha256, _copy)
  files = [x for x in source.iterdir() if x.suffix in (".safetensors", ".json")]
  if not any(x.suffix == ".safetensors" for x in files):
    return _checked(source, sha256)
  for file in files:
    _download(str(file), target / file.name, None, _copy)
  return _checked(target, sha256)


def _copy(url: str, output_file: str, _: Any) -> None:
  epath.Path(url).copy(output_file, overwrite=True)


def _from_hub(name: str, cache: epath.PathLike | None) -> epath.Path:
  """Returns the folder of a repository of the Hugging Face hub."""
  hub = _import("huggingface_hub")
  repository, _, revision = name.removeprefix("hf-hub:").partition("@")
  errors = _import("huggingface_hub.errors")
  endpoint = _import("huggingface_hub.constants").ENDPOINT
  answers = (errors.HfHubHTTPError, errors.HFValidationError)
  try:
    path = hub.snapshot_download(
      repository,
      revision=revision or None,
      cache_dir=cache and epath.Path(cache).expanduser(),
      allow_patterns=["*.safetensors", "*.json"],
    )
  except (*answers, errors.LocalEntryNotFoundError) as error:
    cause = error if isinstance(error, answers) else error.__cause__
    told = isinstance(cause, answers)
    why = "does not give it" if told else "cannot be reached"
    raise ValueError(
      f"weights: got {name!r}; it is not in the cache, and {endpoint} {why}: "
      f"{' '.join(str(cause).split())}.{catalog.closest(name) if told else ''} "
      f"Check the name, the network and HF_HUB_OFFLINE. {_ELSEWHERE}."
    ) from None
  folder = epath.Path(path)
  if not any(folder.glob("*.safetensors")):
    raise ValueError(
      f"weights: got {name!r}; the repository has no .safetensors, and other "
      "files can run code when they are read. Convert them first."
    )
  return folder


def _import(module: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError:
    raise ImportError(
      f'weights: fetching needs {module}. Run pip install -e ".[hub]", or '
      "give the path of a file."
    ) from None
