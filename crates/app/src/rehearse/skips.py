"""What a rehearsal may leave out when asked to: checkpoints on disk (`--skip-saving`), experiment trackers (`--skip-logging`).

Part of `vramcast rehearse`; standard library only.
"""
import os

SAVING = os.environ.get("VRAMCAST_SKIP_SAVING") == "1"
LOGGING = os.environ.get("VRAMCAST_SKIP_LOGGING") == "1"
# Trackers have a switch of their own.
SWITCHES = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug", "CLEARML_OFFLINE_MODE": "1"}


def nothing(*args, **kwargs):
    """In place of a function that writes."""


def replace(*names):
    def after(module):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, nothing)

    return after


def writer(module):
    """TensorBoard's: every `add_…` does nothing."""
    for name in [name for name in dir(module.SummaryWriter) if name.startswith("add_")]:
        setattr(module.SummaryWriter, name, nothing)


AFTER_IMPORT = {}
if SAVING:
    AFTER_IMPORT |= {
        "torch.serialization": replace("save"),
        "safetensors.torch": replace("save_file", "save_model"),
        "torch.distributed.checkpoint.state_dict_saver": replace("save", "async_save", "save_state_dict"),
    }
if LOGGING:
    os.environ.update(SWITCHES)
    AFTER_IMPORT |= {"torch.utils.tensorboard.writer": writer}
