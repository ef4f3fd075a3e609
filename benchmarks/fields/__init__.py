"""Fields: is the safe flag a gate for shifted inputs, and are the bounds narrow?"""
