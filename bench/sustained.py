"""What a GPU keeps up: each implementation alone for seconds on a hot card, as in training, with what that costs.

Speeds of short turns say what a kernel can do on a cool card. In training a card stands at its limit of power, clocks
fall, and the kernel that takes less energy is the faster one. So every row here heats the card first, then runs each
implementation alone, without pauses, and reads NVML's counters of energy and clock meanwhile.
"""
import ctypes
import threading
import time

import needs

needs.modules("torch")

import torch


class Meter:
    """NVML's energy counter and SM clock of torch's current device."""

    CLOCK_SM = 1

    def __init__(self):
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.check(self.nvml.nvmlInit_v2())
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self.device = ctypes.c_void_p()
        name = (uuid if uuid.startswith("GPU-") else "GPU-" + uuid).encode()
        self.check(self.nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self.device)))

    @staticmethod
    def check(status):
        if status != 0:
            raise RuntimeError(f"NVML: error {status}")

    def joules(self):
        millijoules = ctypes.c_ulonglong()
        self.check(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(millijoules)))
        return millijoules.value / 1000

    def megahertz(self):
        clock = ctypes.c_uint()
        self.check(self.nvml.nvmlDeviceGetClockInfo(self.device, self.CLOCK_SM, ctypes.byref(clock)))
        return clock.value


class Clocks(threading.Thread):
    """Reads the clock every 20 ms while a block of code runs; `mean` is what it was."""

    def __init__(self, meter):
        super().__init__(daemon=True)
        self.meter, self.read, self.done = meter, [], threading.Event()

    def run(self):
        while not self.done.wait(0.02):
            self.read.append(self.meter.megahertz())

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.join()

    @property
    def mean(self):
        return sum(self.read) / max(1, len(self.read))


def heat(seconds):
    """Matrix products until the card is warm and its clock has settled."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()


def keep_up(run, seconds, meter):
    """Runs without pauses for about so many seconds. Returns (seconds a run, mean MHz, watts, joules a run)."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    begin.record()
    for _ in range(5):
        run()
    end.record()
    torch.cuda.synchronize()
    batch = max(1, int(0.1 * 5000 / max(begin.elapsed_time(end), 1e-3)))

    def go(seconds):
        # Events bound how far the host runs ahead: one batch waits in the queue while another runs.
        count, waiting, stop = 0, [], time.monotonic() + seconds
        while time.monotonic() < stop:
            for _ in range(batch):
                run()
            count += batch
            waiting.append(torch.cuda.Event())
            waiting[-1].record()
            if len(waiting) > 2:
                waiting.pop(0).synchronize()
        torch.cuda.synchronize()
        return count

    go(seconds / 4)  # the clock settles
    with Clocks(meter) as clocks:
        started, joules = time.monotonic(), meter.joules()
        count = go(seconds)
        joules, took = meter.joules() - joules, time.monotonic() - started
    return took / count, clocks.mean, joules / took, joules / count


def section(page, cases, implementations, seconds):
    """A table: a row a case, pass and implementation. implementations(case) gives {name: (forward, backward)}; the
    first one is ours. Marks: at least the speed of the best other one."""
    meter = Meter()
    page.say("## Sustained\n")
    page.say(f"Each alone for {seconds:g} s on a hot card: TFLOP/s, MHz, W, and joules a TFLOP (NVML's counters).\n")
    page.table("case", "pass", "implementation", "TFLOP/s", "MHz", "W", "J / TFLOP", "over the best other")
    heat(4)
    for case in cases:
        made = implementations(case)
        for index, (which, factor) in enumerate((("forward", 1), ("backward", 2.5))):
            operations = factor * case.operations / 1e12
            found = {name: keep_up(passes[index], seconds, meter) for name, passes in made.items()}
            speed = {name: operations / took for name, (took, *_) in found.items()}
            ours, *others = speed
            for name, (_, clock, watts, joules) in found.items():
                ratio = ""
                if name == ours and others:
                    times = speed[ours] / max(speed[other] for other in others)
                    page.mark(f"sustained {which}: at least the better peer", times >= 1)
                    page.mark(f"sustained {which}: at least 1.05 of the better peer", times >= 1.05)
                    ratio = f"{times:.3f}"
                cells = (str(case), which, name, f"{speed[name]:.0f}", f"{clock:.0f}", f"{watts:.0f}",
                         f"{joules / operations:.3f}", ratio)
                page.say("| " + " | ".join(cells) + " |")
        torch.cuda.empty_cache()
    page.say()
