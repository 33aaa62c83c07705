"""Diagnose a trace of the PyTorch profiler: the walls, with evidence and fixes.

Pass the path of a trace (.json, .json.gz) or of a folder of them, one a rank. Without a path a few
steps of a small MoE layer are profiled on this machine, which needs torch.
"""

import sys
import tempfile
from pathlib import Path

import moewright as mw


def profile_a_small_layer(folder: Path) -> Path:
    """Trace three training steps of two experts and return the trace."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    experts = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(2))
    optimizer = torch.optim.AdamW(experts.parameters())
    tokens = torch.randn(512, 256)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(3):
            loss = sum(expert(tokens).square().mean() for expert in experts)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    return path


path = Path(sys.argv[1]) if sys.argv[1:] else profile_a_small_layer(Path(tempfile.mkdtemp()))
diagnosis = mw.diagnose(path)
print(diagnosis)
for finding in diagnosis.findings:
    print(f"{finding.wall}: {finding.title}")
    for line in finding.evidence:
        print(f"  {line}")
    for fix in finding.fixes[:2]:
        print(f"  to try: {fix.text}")
