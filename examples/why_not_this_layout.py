"""Ask why a layout that somebody proposes is not the best one, and put both side by side."""

import moewright as mw

PROPOSED = "tp8,ep1,mbs4"

plans = mw.plan("Qwen3-30B-A3B", on="16xH100", global_batch=512, top=1)
print(mw.why_not(plans, PROPOSED))

proposed = mw.estimate("Qwen3-30B-A3B", PROPOSED, on="16xH100", global_batch=512)
print(mw.compare(plans.best, proposed))
