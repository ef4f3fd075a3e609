"""The run-time check of annotations: whole numbers are floats too, as for every static checker."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
