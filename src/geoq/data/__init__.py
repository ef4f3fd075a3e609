"""What depends on the kinds of data of the user: tables, coordinates, distances, domains, masks."""
