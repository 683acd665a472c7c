"""lmpool under the names of other libraries: each module needs the one that it is called after."""
