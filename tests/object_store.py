"""An object store in memory, of one test alone, behind `s3://`."""

from etils.epath import backend
from fsspec.implementations import memory


class Store(memory.MemoryFileSystem):
  """Holds objects, which can be replaced, but not appended to."""

  cachable = False  # fsspec would hand out the same one again.

  def __init__(self):
    super().__init__()
    self.store = {}  # Those of the class are shared by all.
    self.pseudo_dirs = [""]

  @classmethod
  def _strip_protocol(cls, path):
    return super()._strip_protocol(path.replace("s3://", "memory://"))

  def _open(self, path, mode="rb", **kwargs):
    if "a" in mode:
      raise NotImplementedError("append")
    return super()._open(path, mode=mode, **kwargs)


def install(monkeypatch):
  """Makes epath find a new, empty store for the rest of the test.

  Not by fsspec's registry: epath keeps the first file system of a scheme for as
  long as the process lives, so that a second test would get the first one's.
  """
  store = Store()
  monkeypatch.setenv("EPATH_USE_TF", "false")
  monkeypatch.setattr(backend.fsspec_backend, "fs", lambda path: store)
