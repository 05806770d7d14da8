"""The host waits for the device because the program says so."""

from __future__ import annotations

from torchtraceap.labels.pattern import Loop, Pattern, Site, Variant, register
from torchtraceap.labels.patterns._common import call_sites


def _device(loop: Loop) -> list[Site]:
    import torch

    return call_sites(loop, lambda: torch.accelerator.synchronize(loop.device))


def _stream(loop: Loop) -> list[Site]:
    import torch

    return call_sites(loop, lambda: torch.accelerator.current_stream(loop.device).synchronize())


def _event(loop: Loop) -> list[Site]:
    import torch

    def wait() -> None:
        event = torch.Event(loop.device)
        event.record()
        event.synchronize()

    return call_sites(loop, wait)


def _event_record(loop: Loop) -> list[Site]:
    import torch

    return call_sites(loop, lambda: torch.Event(loop.device).record())


def _query(loop: Loop) -> list[Site]:
    import torch

    return call_sites(loop, lambda: torch.accelerator.current_stream(loop.device).query())


register(
    Pattern(
        id="explicit_synchronize",
        title="Explicit synchronisation",
        definition=(
            "In the middle of a step the program tells the host to wait for the device, a stream or an event "
            "and does nothing else (in host_sync it reads a value). Until the wait is over the host launches "
            "nothing, and afterwards the GPU idles until the queue fills again."
        ),
        scope="local",
        lanes=frozenset({"cpu"}),
        mechanism="marker",
        belongs="CPU: the runtime call that waits, and for an event the call that records it. GPU: nothing.",
        needs_gpu=True,
        variants=(
            Variant("device", "torch.cuda.synchronize().", _device, max_sites=6),
            Variant("stream", "torch.cuda.current_stream().synchronize().", _stream, max_sites=6),
            Variant(
                "event", "An event is recorded and at once waited for.", _event, heldout=True, max_sites=6
            ),
        ),
        lookalikes=(
            Variant("event_record", "An event is recorded, and nobody waits.", _event_record, max_sites=6),
            Variant(
                "query",
                "The stream is asked whether it is done, without a wait.",
                _query,
                max_sites=6,
            ),
        ),
        remedy="""\
# To time a step, record events and read them once in a while, when the work is long done.
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
train_step(batch)
end.record()
timed.append((start, end))
if step % log_every == 0:
    torch.cuda.synchronize()  # one wait for many steps
    print(sum(start.elapsed_time(end) for start, end in timed) / len(timed))
    timed.clear()

# To order streams, let one wait for the other on the device.
side_stream.wait_stream(torch.cuda.current_stream())
""",
        references=(
            "https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution",
            "https://docs.pytorch.org/docs/stable/generated/torch.accelerator.synchronize.html",
            "https://github.com/pytorch/pytorch/issues/18012",
            "https://github.com/facebookresearch/ConvNeXt/issues/106",
        ),
    )
)
