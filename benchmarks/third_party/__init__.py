"""GeoQ with models of other packages: neural operators, echo state networks, recurrent networks and two measured series."""
