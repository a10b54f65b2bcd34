"""Parameter counts of every published ResNet and hybrid, to the digit.

The numbers were computed from the reference code, big_vision and
vision_transformer, not from this package.
"""

import jax
import numpy as np
import pytest

from vit_jax.models import bit, hybrid, resnet

# With 0, 1000 and 21843 classes: post-activation, and pre-activation (BiT).
RESNETS = {
  "R26x1": (
    (13_946_176, 15_995_176, 58_702_483),
    (13_938_496, 15_987_496, 58_694_803),
  ),
  "R50x1": (
    (23_508_032, 25_557_032, 68_264_339),
    (23_500_352, 25_549_352, 68_256_659),
  ),
  "R50x2": (
    (93_907_072, 98_004_072, 183_397_843),
    (93_891_712, 97_988_712, 183_382_483),
  ),
  "R50x3": (
    (211_197_120, 217_342_120, 345_422_355),
    (211_174_080, 217_319_080, 345_399_315),
  ),
  "R101x1": (
    (42_500_160, 44_549_160, 87_256_467),
    (42_492_480, 44_541_480, 87_248_787),
  ),
  "R101x3": (
    (381_812_928, 387_957_928, 516_038_163),
    (381_789_888, 387_934_888, 516_015_123),
  ),
  "R152x1": (
    (58_143_808, 60_192_808, 102_900_115),
    (58_136_128, 60_185_128, 102_892_435),
  ),
  "R152x2": (
    (232_253_568, 236_350_568, 321_744_339),
    (232_238_208, 236_335_208, 321_728_979),
  ),
  "R152x4": (
    (928_370_944, 936_563_944, 1_107_330_643),
    (928_340_224, 936_533_224, 1_107_299_923),
  ),
  "R200x3": (
    (562_511_040, 568_656_040, 696_736_275),
    (562_488_000, 568_633_000, 696_713_235),
  ),
}

# Each row holds 0, 1000 and 21843 classes: at 224 px, with a tanh
# representation of size D, at 384 px.
HYBRIDS = {
  "R+Ti/16": (
    (6_144_704, 6_337_704, 10_360_403),
    (6_181_760, 6_374_760, 10_397_459),
    (6_162_944, 6_355_944, 10_378_643),
  ),
  "R26+S/32": (
    (36_046_912, 36_431_912, 44_456_467),
    (36_194_752, 36_579_752, 44_604_307),
    (36_083_392, 36_468_392, 44_492_947),
  ),
  "R26+B/32": (
    (100_614_976, 101_383_976, 117_412_243),
    (101_205_568, 101_974_568, 118_002_835),
    (100_687_936, 101_456_936, 117_485_203),
  ),
  "R50+B/16": (
    (97_890_112, 98_659_112, 114_687_379),
    (98_480_704, 99_249_704, 115_277_971),
    (98_181_952, 98_950_952, 114_979_219),
  ),
  "R50+L/32": (
    (327_969_856, 328_994_856, 350_358_931),
    (329_019_456, 330_044_456, 351_408_531),
    (328_067_136, 329_092_136, 350_456_211),
  ),
}


# Enough from day to day, with the trunks of the hybrids.
DAILY = ("R26x1", "R+Ti/16")


def each_row(table):
  marks = {v: () if v in DAILY else pytest.mark.slow for v in table}
  rows = [pytest.param(v, marks=m) for v, m in marks.items()]
  return pytest.mark.parametrize("variant", rows)


def count(model, *, size=224):
  image = jax.ShapeDtypeStruct((1, size, size, 3), np.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  return sum(x.size for x in jax.tree.leaves(params))


def test_the_tables_hold_every_variant():
  assert {v.split("x")[0] for v in RESNETS} == set(resnet.VARIANTS)
  # The paper's own, of which no reference count is public.
  assert set(hybrid.VARIANTS) - set(HYBRIDS) == {"R50+B/32", "R50+L/16"}


@each_row(RESNETS)
def test_count_of_a_resnet_equals_big_vision(variant):
  counts = tuple(
    tuple(
      count(cls(**resnet.sizes(variant), num_classes=k))
      for k in (0, 1000, 21843)
    )
    for cls in (resnet.ResNet, bit.BiT)
  )
  assert counts == RESNETS[variant]


@each_row(HYBRIDS)
def test_count_of_a_hybrid_equals_vision_transformer(variant):
  sizes = hybrid.sizes(variant)
  counts = tuple(
    tuple(
      count(
        hybrid.Hybrid(**sizes, num_classes=k, representation_size=r), size=size
      )
      for k in (0, 1000, 21843)
    )
    for size, r in ((224, None), (224, sizes["width"]), (384, None))
  )
  assert counts == HYBRIDS[variant]


@pytest.mark.parametrize(
  ("stages", "expected"),
  [
    ((3, 4, 9), 11_894_848),
    ((3, 4, 6, 3), 23_508_032),
    ((2, 2, 2, 2), 13_946_176),
  ],
)
def test_count_of_the_trunk_of_a_hybrid(stages, expected):
  assert count(resnet.Trunk(stages=stages)) == expected
