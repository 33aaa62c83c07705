"""Plan a model on a cluster: the best layouts, why the first is first, what would change it."""

import moewright as mw

plans = mw.plan("Qwen3-30B-A3B", on="16xH100", global_batch=512, top=3)
print(plans)
for sentence in plans.why:
    print(sentence)

best = plans.best
print(best)
for gain in best.gains:
    print(
        f"with {gain.change}: {gain.step_s:.3g} s a step in place of {best.estimate.step_s:.3g} s"
    )
