from geoq.bounds.two_laws import TwoLawBound
from geoq.bounds.climatology import Climatology
