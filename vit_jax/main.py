"""Trains or evaluates what a config describes.

  python -m vit_jax.main --config=configs/smoke.py --workdir=runs/smoke

The same command again goes on where it stopped. Exit codes: 0 done, 75 stopped
on request with its state saved, 1 for everything else.
"""

# Data workers import this module anew: only what is light, at this level.
from typing import Any

from absl import app, flags
from ml_collections import config_flags

from vit_jax import command


def define_flags() -> None:
  """Defines the flags of this command."""
  config_flags.DEFINE_config_file(
    "config",
    None,
    "Config file, with an optional :argument.",
    # Unknown keys are reported with all other problems of the config.
    accept_new_attributes=True,
    lock_config=False,
  )
  flags.DEFINE_string(
    "workdir", None, "Folder of the run: checkpoints, metrics, report."
  )
  flags.DEFINE_enum(
    "mode", "train", ["train", "eval"], "Train to the end, or evaluate."
  )
  flags.DEFINE_string(
    "checkpoint",
    None,
    "With --mode=eval, instead of the newest step of the workdir: best, a step "
    "such as 800, the path of a checkpoint, or weights of any format.",
  )
  flags.DEFINE_bool(
    "force", False, "Use a workdir of something else or of another config."
  )


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit code."""
  from absl import logging

  from vit_jax import preemption, processes

  options = flags.FLAGS
  if argv[1:]:
    raise ValueError(f"arguments: got {argv[1:]}; each one starts with --.")
  if options.config is None or not options.workdir:
    raise ValueError("main: needs --config=FILE and --workdir=DIR. See --help.")
  processes.start()
  with preemption.StopSignal() as stop:
    try:
      _run(options, stop)
    except preemption.Preempted as stopped:
      logging.warning("%s; the same command goes on from there", stopped)
      return preemption.EXIT_CODE
  return 0


def _run(options: flags.FlagValues, stop: Any) -> None:
  import jax

  from vit_jax import config, evaluate, train, workdir, writers

  path = workdir.resolve(options.workdir)
  experiment = config.parse(
    options.config,
    name=config_flags.get_config_filename(options["config"]),
    num_devices=jax.device_count(),
  )
  if options.mode == "eval":
    results = evaluate.evaluate(
      experiment, path, checkpoint_path=options.checkpoint
    )
  else:
    results = train.train(experiment, path, stop=stop, force=options.force)
  if jax.process_index() == 0:
    command.show(writers.results_table(results))
    if options.mode == "train":
      command.show(f"Report: {path / 'report.html'}")


if __name__ == "__main__":
  define_flags()
  app.run(
    lambda argv: command.run(lambda: main(argv)),
    flags_parser=command.parse_flags,
  )
