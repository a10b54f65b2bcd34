import ast
import pathlib
import signal

import pytest
from absl import flags
from ml_collections import config_flags

from vit_jax import command, config, losses, optim, preprocess, spec
from vit_jax.data import fake, transforms
from vit_jax.evaluators import classification
from vit_jax.models import vit

# ml_collections loads config files in an old way.
pytestmark = pytest.mark.filterwarnings(
  "ignore:the load_module:DeprecationWarning"
)
ROOT = pathlib.Path(__file__).parents[1]


def complete():
  """Returns a config without a problem on 8 devices."""
  result = config.base_config()
  result.model = spec.spec(vit.ViT, **vit.sizes("mu/16"))
  result.batch_size = 16
  result.total_steps = 100
  source = {"num_examples": 64, "size": (48, 40), "num_classes": 10}
  result.data.source = spec.spec(fake.FakeSource, **source)
  result.data.transform = spec.spec(transforms.inception_train, size=(32, 32))
  result.evals.val = spec.spec(
    classification.ClassificationEvaluator,
    source=spec.spec(fake.FakeSource, **source),
    transform=spec.spec(transforms.resize, size=(32, 32)),
  )
  return result


def problems(changes=None, *, num_devices=8, remove=()):
  """Returns the lines of the error that a changed config gives."""
  tree = config.parse(complete(), num_devices=8).model_dump()
  for path, value in (changes or {}).items():
    *parents, last = path.split(".")
    node = tree
    for parent in parents:
      node = node[parent]
    node[last] = value
  for path in remove:
    *parents, last = path.split(".")
    node = tree
    for parent in parents:
      node = node[parent]
    del node[last]
  with pytest.raises(ValueError) as caught:
    config.parse(tree, name="configs/x.py", num_devices=num_devices)
  first, *lines = str(caught.value).split("\n  ")
  assert first == "configs/x.py is not runnable:"
  return lines


def parse_command_line(monkeypatch, *arguments, file="configs/smoke.py"):
  """Returns what the flags of `vit_jax.main` make of a command line."""
  values = flags.FlagValues()
  monkeypatch.setattr(flags, "FLAGS", values)
  argv = ["main", f"--config={ROOT / file}", *arguments]
  monkeypatch.setattr("sys.argv", argv)
  config_flags.DEFINE_config_file(
    "config",
    None,
    "Config.",
    flag_values=values,
    accept_new_attributes=True,
    lock_config=False,
  )
  before = signal.getsignal(signal.SIGINT)
  try:
    command.parse_flags(argv)
  finally:
    signal.signal(signal.SIGINT, before)
  return values.config


def test_a_good_config_is_parsed():
  experiment = config.parse(complete(), num_devices=8)
  assert experiment.batch_size == 16
  assert experiment.model["fn"] is vit.ViT
  assert experiment.evals["val"]["transform"]["size"] == (32, 32)


def test_base_config_has_the_defaults_of_experiment():
  base = config.base_config().to_dict()
  tree = {
    **base,
    "model": spec.spec(vit.ViT, **vit.sizes("mu/16")).to_dict(),
    "total_steps": 1,
    "data": {**base["data"], "source": {}, "transform": {}},
  }
  given = config.Experiment(**tree)
  defaults = config.Experiment(
    model=tree["model"],
    total_steps=1,
    data=config.Data(source={}, transform={}),
  )
  assert given == defaults
  missing = config.Experiment.model_fields.keys() - base.keys()
  assert missing == {"model", "total_steps"}


def test_two_base_configs_share_nothing():
  one, two = config.base_config(), config.base_config()
  one.schedule.lr = 5.0
  one.evals.val = 1
  one.mesh.data = 4
  assert two == config.base_config()


def test_steps_counts_whole_batches():
  assert config.steps(epochs=40, examples=1_437, batch_size=64) == 898
  assert config.steps(epochs=0.1, examples=64, batch_size=64) == 1
  assert config.steps(epochs=300, examples=1_281_167, batch_size=4096) == 93_835


def test_all_problems_are_reported_at_once():
  lines = problems(
    {
      "batch_size": 4095,
      "model.pool": "clss",
      "model.num_heads": 7,
      "data.transform.size": (230, 224),
      "data.transform.backgruond": 3,
      "schedule.warmup_steps": 10_000,
      "total_steps": 5_000,
      "weight_decay": -0.1,
      "seeed": 1,
      "rules.frezee": (),
      "best_metric": "test/accuracy",
      "mesh": {"data": 4, "fsdp": 2},
    }
  )
  assert [line.split(":")[0] for line in lines] == [
    "weight_decay",
    "rules.frezee",
    "seeed",
    "data.transform.backgruond",
    "model.pool",
    "model.num_heads",
    "schedule.warmup_steps",
    "model.patch_size",
    "evals.val.transform.size",
    "batch_size",
    "best_metric",
  ]


def test_a_batch_that_the_devices_do_not_divide_gets_proposals():
  assert problems({"batch_size": 4095, "mesh": {"data": 4, "fsdp": 2}}) == [
    "batch_size: got 4095; must be divisible by 8 devices (mesh data=4 * "
    "fsdp=2). Try 4088 or 4096."
  ]
  assert problems({"batch_size": 20, "accum_steps": 3}) == [
    "batch_size: got 20; must be divisible by 8 devices (mesh data=1 * fsdp=8)"
    " times accum_steps 3. Try 24."
  ]


def test_a_mesh_must_take_all_devices():
  assert problems({"mesh": {"data": 3, "fsdp": -1}}) == [
    "mesh: got data=3, fsdp=-1; their product must be the 8 devices. Use -1 "
    "for one of them to take what is left."
  ]


def test_a_size_that_the_patches_do_not_divide_gets_the_nearest_legal_ones():
  size = (230, 224)
  lines = problems(
    {"data.transform.size": size, "evals.val.transform.size": size}
  )
  assert lines == [
    f"model.patch_size: got (16, 16) with {path}.size (230, 224); (6, 0) "
    "pixels are left over. Use size (224, 224) or (240, 224)."
    for path in ("data.transform", "evals.val.transform")
  ]
  lines = problems({"model.patch_size": (32, 48)})
  assert "(0, 32) pixels are left over. Use size (32, 48)." in lines[0]


def test_a_warmup_must_end():
  assert problems({"schedule.warmup_steps": 100}) == [
    "schedule.warmup_steps: got 100; must be >= 0 and < total_steps = 100. "
    "Warm up for fewer updates or train longer."
  ]


def test_an_unknown_key_gets_the_known_ones_and_the_closest():
  (line,) = problems({"wieght_decay": 1.0})
  assert line.startswith("wieght_decay: unknown; must be one of ['name', ")
  assert line.endswith(" Did you mean 'weight_decay'?")
  (line,) = problems({"rules.layer_decya": 1.0})
  assert line.startswith("rules.layer_decya: unknown; must be one of ['decay',")
  assert line.endswith(" Did you mean 'layer_decay'?")
  (line,) = problems({"evals.val.source.num_exmples": 1})
  assert line.startswith("evals.val.source.num_exmples: unknown; vit_jax.data.")
  assert line.endswith(" Did you mean 'num_examples'?")


def test_what_has_no_default_must_be_there():
  assert problems(
    remove=("model", "total_steps", "data.source", "data.transform")
  ) == [
    f"{path}: missing; set it in the config file."
    for path in ("model", "data.source", "data.transform", "total_steps")
  ]
  assert problems(remove=("data",)) == [
    f"{path}: missing; set it in the config file."
    for path in ("data.source", "data.transform")
  ]


def test_base_config_alone_names_what_is_missing():
  with pytest.raises(ValueError, match="config is not runnable:") as caught:
    config.parse(config.base_config())
  assert len(str(caught.value).splitlines()) == 5


def test_a_missing_or_wrong_argument_of_a_spec_is_named():
  assert problems({"model.depth": "many"}, remove=("model.width",)) == [
    "model.depth: got 'many'; it should be a valid integer.",
    "model.width: missing; vit_jax.models.vit:ViT needs it.",
  ]


@pytest.mark.parametrize(
  "path, value, line",
  [
    ("seed", -1, "seed: got -1; it should be greater than or equal to 0."),
    ("batch_size", 0, "batch_size: got 0; it should be greater than 0."),
    ("batch_size", 8.0, "batch_size: got 8.0; it should be a valid integer."),
    ("ema_decay", 1.0, "ema_decay: got 1.0; it should be less than 1."),
    ("name", 3, "name: got 3; it should be a valid string."),
    ("tensorboard", "yes", "tensorboard: got 'yes'; it should be a valid bool"),
    ("rules.layer_decay", 0.0, "rules.layer_decay: got 0.0; it should be gr"),
    ("rules.freeze", "head", "rules.freeze: got 'head'; it should be a valid"),
    ("rules", 3, "rules: got 3; it should be a valid dictionary"),
    ("data", 3, "data: got 3; it should be a valid dictionary"),
    ("evals", None, "evals: got None; it should be a valid dictionary."),
    ("evals.val", 3, "evals.val: got 3; it should be a valid dictionary."),
    ("model", {}, "model: got {}; expected spec(function, ...)."),
    ("loss", {"fn": 3}, "loss: got {'fn': 3}; expected spec(function, ...)."),
    ("weight_decay", float("nan"), "weight_decay: got nan; it should be"),
    ("weight_decay", float("inf"), "weight_decay: got inf; it should be"),
    ("schedule.lr", float("inf"), "schedule.lr: got inf; it should be a finit"),
    ("schedule.lr", 0.0, "schedule.lr: got 0.0; must be > 0. Set the peak"),
    ("loss.label_smoothing", 1.0, "loss.label_smoothing: got 1.0; must be in"),
    ("mix.alpha", -1.0, "mix.alpha: got -1.0; must be >= 0."),
    ("normalize.std", (0.0,), "normalize.std: got (0.0,) with mean (127.5,);"),
    ("model.dropout", 1.0, "model.dropout: got 1.0; must be in [0, 1)."),
    ("model.num_heads", 7, "model.num_heads: got 7; must divide width 32."),
    ("model.num_classes", 9, "model.num_classes: given by the run. Leave it"),
    ("schedule.total_steps", 9, "schedule.total_steps: given by the run."),
    ("data.transform.area", (2.0, 1.0), "data.transform.area: got (2.0, 1.0)"),
  ],
)
def test_a_wrong_value_is_named_with_what_it_should_be(path, value, line):
  assert problems({path: value})[0].startswith(line)


def test_a_problem_hides_no_other_and_causes_none():
  lines = problems({"total_steps": 0, "batch_size": 17})
  assert [line.split(":")[0] for line in lines] == ["total_steps", "batch_size"]
  lines = problems({"model.patch_size": (1, 2, 3), "mix.alpha": -1.0})
  assert [line.split(":")[0] for line in lines] == [
    "model.patch_size",
    "mix.alpha",
  ]


def test_a_part_stands_only_where_what_it_makes_is_wanted():
  loss = spec.spec(losses.softmax_cross_entropy).to_dict()
  normalize = spec.spec(preprocess.Normalize).to_dict()
  source = spec.spec(fake.FakeSource, num_examples=1).to_dict()
  lines = problems(
    {"model": loss, "optimizer": normalize, "data.transform": source}
  )
  assert lines == [
    "model: got vit_jax.losses:softmax_cross_entropy; it must make a Module. "
    "Use another.",
    "data.transform: got vit_jax.data.fake:FakeSource; it must make a function."
    " Use another.",
    "optimizer: got vit_jax.preprocess:Normalize; it must make a "
    "GradientTransformation. Use another.",
  ]


def test_training_and_evaluation_must_decode_alike():
  lines = problems(
    {"data.transform.exif": False, "evals.val.transform.background": 0}
  )
  assert lines == [
    "evals.val.transform.exif: got True; must equal data.transform.exif False."
    " Decode alike everywhere.",
    "evals.val.transform.background: got 0; must equal "
    "data.transform.background 255. Decode alike everywhere.",
  ]


def test_16_bits_need_a_range_of_their_own():
  changed = complete()
  changed.data.transform.bits = changed.evals.val.transform.bits = 16
  with pytest.raises(ValueError, match="normalize: got the default, which is"):
    config.parse(changed, num_devices=8)
  changed.normalize.mean = changed.normalize.std = (32767.5,)
  config.parse(changed, num_devices=8)


def test_learned_positions_need_one_size():
  changes = {"evals.val.transform.size": (48, 48)}
  assert problems(changes) == [
    "evals.val.transform.size: got (48, 48); must equal data.transform.size "
    "(32, 32), for which the position embeddings are learned."
  ]
  other = complete()
  other.model.posemb = "sincos2d"
  other.evals.val.transform.size = (48, 48)
  config.parse(other, num_devices=8)


@pytest.mark.parametrize("name", ["test/accuracy", "val", "val/", "accuracy"])
def test_the_best_metric_is_one_of_an_evaluator(name):
  assert problems({"best_metric": name}) == [
    f"best_metric: got {name!r}; must be '<evaluator>/<metric>' with an "
    "evaluator of ['val']."
  ]


def test_a_run_starts_from_one_place():
  (line,) = problems({"init_from": "a", "resume_from": "b"})
  assert line.startswith("init_from: got both it and resume_from; ")


def test_the_command_line_overrides_what_a_config_holds(monkeypatch):
  result = parse_command_line(
    monkeypatch,
    *("--config.ema_decay=0.99", "--config.grad_clip_norm=2"),
    *("--config.schedule.lr=1", "--config.evals.val.batch_size=8"),
    *("--config.model.patch_size=8", "--config.init_from=runs/x"),
    *("--config.rules.freeze=('^head/', 'bias$')", "--config.mesh.data=2"),
    *("--config.model.representation_size=8", "--noconfig.tensorboard"),
    "--config.rules.lr_multipliers=(('^head/', 10.0),)",
  )
  experiment = config.parse(result, num_devices=8)
  assert experiment.ema_decay == 0.99
  assert experiment.grad_clip_norm == 2.0
  assert experiment.schedule["lr"] == 1.0
  assert experiment.evals["val"]["batch_size"] == 8
  assert experiment.model["patch_size"] == (8, 8)
  assert experiment.model["representation_size"] == 8
  assert experiment.init_from == "runs/x"
  assert experiment.rules.freeze == ("^head/", "bias$")
  assert experiment.rules.lr_multipliers == (("^head/", 10.0),)
  assert experiment.mesh.data == 2
  assert not experiment.tensorboard


@pytest.mark.parametrize(
  "value, size",
  [("14", (14, 14)), ("(14,)", (14, 14)), ("14,7", (14, 7))],
)
def test_one_number_on_the_command_line_is_a_pair(monkeypatch, value, size):
  result = parse_command_line(
    monkeypatch,
    f"--config.model.patch_size={value}",
    "--config.data.transform.size=28",
    "--config.evals.val.transform.size=28",
  )
  experiment = config.parse(result)
  assert experiment.model["patch_size"] == size
  assert experiment.data.transform["size"] == (28, 28)


def test_a_typo_on_the_command_line_is_one_problem_among_others(monkeypatch):
  result = parse_command_line(
    monkeypatch,
    *("--config.sed=1", "--config.model.wdith=3", "--config.batch_size=17"),
  )
  with pytest.raises(ValueError) as caught:
    config.parse(result, num_devices=8)
  _, unknown, argument, batch = str(caught.value).splitlines()
  assert unknown.endswith("Did you mean 'seed'?")
  assert argument.endswith("Did you mean 'width'?")
  assert batch.strip().startswith("batch_size: got 17;")


@pytest.mark.parametrize(
  "argument, message",
  [
    (
      "total_steps=1e3",
      "--config.total_steps: got '1e3'; must be a whole numb",
    ),
    (
      "batch_size=1.5",
      "--config.batch_size: got '1.5'; must be a whole number",
    ),
    ("schedule.lr=", "--config.schedule.lr: got ''; must be a number, in digi"),
    ("ema_decay=None", ".* Set None in the config file; here it cannot be"),
    ("evals.foo.a=3", "--config: got 'foo'; there is no such entry. Look into"),
    ("modle.width=3", "--config: 'modle' Did you mean \"model\" instead of"),
  ],
)
def test_a_bad_override_gets_one_line(monkeypatch, argument, message):
  with pytest.raises(SystemExit, match=f"^error: {message}") as caught:
    parse_command_line(monkeypatch, f"--config.{argument}")
  assert str(caught.value).removesuffix("\nSee --help.").count("\n") == 0


@pytest.mark.parametrize(
  "file, message",
  [
    ("configs/smok.py", "--config: got .*smok.py'; there is no such file. Did"),
    ("configs/smoke.py:x", r"--config: get_config\(\) takes 0 positional"),
    ("configs/folder.py", "--config: root: got ''; must be the folder of your"),
    ("configs/folder.py:/no/such", "--config: split: got 'train'; there is no"),
    ("configs/vit_b16.py:B", "--config: variant: got 'B'; must be NAME/PATC"),
  ],
)
def test_a_config_file_that_fails_gets_one_line(monkeypatch, file, message):
  with pytest.raises(SystemExit, match=f"^error: {message}") as caught:
    parse_command_line(monkeypatch, file=file)
  assert "Traceback" not in str(caught.value)


def test_changes_lists_what_differs():
  old = {"a": {"b": 1, "c": [1, 2]}, "d": None, "e": {}}
  new = {"a": {"b": 2, "c": [1, 2]}, "e": {"f": "absent"}}
  assert config.changes(old, new) == {
    "a.b": "1 -> 2",
    "d": "None -> absent",
    "e.f": "absent -> 'absent'",
  }
  assert config.changes(old, old) == {}


def test_only_what_changes_no_number_of_the_training_is_free_to_change():
  for path in ("name", "evals.val.batch_size", "mesh.data", "data.max_bad"):
    assert config.is_free_to_change(path)
  for path in ("names", "seed", "total_steps", "model.depth", "data.source.fn"):
    assert not config.is_free_to_change(path)
  fields = config.Experiment.model_fields
  for path in config.FREE_TO_CHANGE:
    assert path.split(".")[0] in fields


def test_every_field_is_read_somewhere():
  trees = [
    ast.parse(file.read_text("utf-8"))
    for file in (ROOT / "vit_jax").rglob("*.py")
    if file.name != "config.py"
  ]
  nodes = [node for tree in trees for node in ast.walk(tree)]
  read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
  # Passed on as a whole: `make_mesh(**mesh.model_dump())`, `make_tx(**rules)`.
  read |= {node.arg for node in nodes if isinstance(node, ast.arg)}
  for cls in (config.Experiment, config.Data, config.Rules, config.Mesh):
    assert cls.model_fields.keys() - read == set(), cls


def test_a_schedule_of_another_run_length_is_checked():
  tree = complete()
  tree.schedule = spec.spec(optim.rsqrt, lr=1e-3, cooldown_steps=200)
  with pytest.raises(
    ValueError, match=r"schedule.cooldown_steps: got 200; mus"
  ):
    config.parse(tree, num_devices=8)


@pytest.mark.parametrize(
  "key, value",
  [("seed", 2**32), ("total_steps", 2**31), ("batch_size", 10**20)],
)
def test_a_number_beyond_the_device_is_refused(key, value):
  (line,) = problems({key: value})
  assert line.startswith(f"{key}: got {value}; it should be less than")


def test_a_config_file_that_is_not_python_is_shown_the_line(
  monkeypatch, tmp_path
):
  file = tmp_path / "config.py"
  file.write_text("def get_config(:\n")
  with pytest.raises(SystemExit) as caught:
    parse_command_line(monkeypatch, file=file)
  message = str(caught.value)
  assert message.startswith(f'error: --config: File "{file}", line 1\n')
  assert message.endswith("SyntaxError: invalid syntax")
