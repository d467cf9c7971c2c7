"""Where the GPU's time goes in one step, kernel by kernel, for no wrapper, torch's DDP and gradsync."""

import torch.distributed as dist
from engine_gpu import connect, make_step, variants
from torch.profiler import ProfilerActivity, profile

connect("29512")
for name, wrap in variants().items():
    step = make_step(wrap, 16, 1024)
    for _ in range(5):
        step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(2):
            step()
    events = recorded.key_averages()
    kernels = sorted((e for e in events if e.device_type.name == "CUDA"), key=lambda e: -e.self_device_time_total)
    print(f"== {name}: kernels {sum(e.self_device_time_total for e in kernels) / 2e3:.2f} ms a step")
    for event in kernels:
        if any(word in event.key for word in ("Memcpy", "Memset", "nccl", "foreach", "copy", "Fill", "Mul", "multi")):
            print(f"   {event.self_device_time_total / 2e3:8.3f} ms {event.count // 2:5d}×  {event.key[:120]}")
    host = {e.key: e for e in events if e.device_type.name == "CPU"}
    for key in ("aten::_foreach_copy_", "c10d::allreduce_", "aten::fill_", "cudaLaunchKernel"):
        if key in host:
            print(f"   host {host[key].cpu_time_total / 2e3:8.3f} ms {host[key].count // 2:5d}×  {key}")
    del step
dist.destroy_process_group()
