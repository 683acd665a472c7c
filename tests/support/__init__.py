"""What every suite starts its tests with: servers, workers, clients, and waiting for conditions."""
