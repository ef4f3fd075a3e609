"""
A sea surface with land and clouds
==================================

Labelled arrays with land, and with clouds that hide other cells each day. You learn: masked cells do not count, and the answer has the
coordinates of the data.
"""

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from scipy.ndimage import gaussian_filter
from sklearn.linear_model import Ridge

from geoq import GeoQ, TemporalFolds
from geoq.parts import FieldBound, NoFactor
from geoq.xarray import Labelled

rng = np.random.default_rng(0)
days = np.arange("2023-01-01", "2024-03-01", dtype="M8[D]")
lat, lon = np.linspace(30, 50, 16), np.linspace(-30, -5, 24)
grid = {"time": days, "lat": lat, "lon": lon}
season = np.cos(2 * np.pi * (np.arange(len(days)) - 220) / 365)[:, None, None]
eddies = gaussian_filter(rng.normal(size=(len(days), 16, 24)), (4, 2, 2))
values = 25 - 0.4 * lat[:, None] + 4 * season * (lat[:, None] / 40) + 2 * eddies / eddies.std()
sea = xr.DataArray(values, grid, attrs={"units": "degC"})
land = (sea.lon > -10) & (sea.lat > 36)
now, soon = sea[:-3], sea[3:].assign_coords(time=days[:-3])  # three days ahead
soon = soon.where(~land).where(rng.random(soon.shape) > 0.2)  # a fifth is under clouds


def train(x, y):
    clear = np.where(np.isnan(np.ma.filled(y, np.nan)), x, np.ma.filled(y, np.nan))
    ridge = Ridge(100).fit(x.reshape(len(x), -1), clear.reshape(len(x), -1))
    return lambda x: ridge.predict(x.reshape(len(x), -1)).reshape(x.shape)


quick = FieldBound(NoFactor())
labelled = Labelled(GeoQ(None, train, folds=TemporalFolds(5, gap=15), bound_model=quick), "time")
labelled.fit(now.sel(time=slice("2023-12")), soon.sel(time=slice("2023-12")))

answer = labelled.assess(now.sel(time=slice("2024-01-10", "2024-02")))
error = abs(sea[3:].assign_coords(time=days[:-3]).sel(time=answer.time) - answer.prediction)
figure, panels = plt.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
day = "2024-02-01"
answer.prediction.sel(time=day).plot(ax=panels[0], cbar_kwargs={"label": "degC"})
answer.error_hat.sel(time=day).plot(ax=panels[1], vmin=0, vmax=6, cbar_kwargs={"label": "degC"})
within = (error <= answer.error_hat).where(~land).mean("time").rename("fraction").drop_attrs()
within.plot(ax=panels[2], vmin=0.7, vmax=1)
for axes, title in zip(panels, ("prediction", "bound", "days within the bound"), strict=True):
    axes.set(title=title, facecolor="0.8")
plt.show()
