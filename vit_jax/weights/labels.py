"""Names of the classes of published heads."""

from pathlib import Path

_FOLDER = Path(__file__).with_name("class_names")
# In Google's list, but not in the release of fall 2011, by class id there:
# "picture" and "bleacher".
_NOT_IN_2011 = (9205, 15027)


def names(num_classes: int) -> tuple[str, ...] | None:
  """Returns the names by class id of a head of this size, or None.

  1,000 classes are taken for ImageNet, 21,843 for ImageNet-21k as Google's
  models have it, 21,841 for its release of fall 2011. For any other size, and
  so for the 21,842 of some, nothing is guessed.

  A name is all the words of a class, such as "tench, Tinca tinca"; it is not
  always unique.
  """
  if num_classes == 1_000:
    return _read("imagenet.txt")
  if num_classes == 21_843:
    return _read("imagenet21k.txt")
  if num_classes == 21_841:
    everything = enumerate(_read("imagenet21k.txt"))
    return tuple(name for i, name in everything if i not in _NOT_IN_2011)
  return None


def _read(file: str) -> tuple[str, ...]:
  return tuple((_FOLDER / file).read_text("utf-8").splitlines())
