"""Read a Megatron-LM launch script: does it fit, how fast is it, and what would be faster."""

from pathlib import Path

import moewright as mw

script = Path(__file__).with_name("qwen3_30b_16h100.sh")
reading = mw.read_flags(script, on="H100")
for note in reading.notes:
    print(note)
print(reading.plan)

job = reading.plan
plans = mw.plan(
    job.model,
    on=job.hardware,
    seq_len=job.workload.seq_len,
    global_batch=job.workload.global_batch,
    top=1,
)
gain = job.estimate.step_s / plans.best.estimate.step_s - 1
print(f"the planner's own layout is {gain:+.1%} faster: {plans.best.layout}")
