"""Result files of load generators, under our names and units: a file for each format."""
