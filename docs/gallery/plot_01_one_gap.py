"""
One input, one gap
==================

You learn: where the data end, the flag changes before the bound becomes useless.
"""

# %%
import matplotlib.pyplot as plt
import numpy as np

plt.plot(np.arange(3))
