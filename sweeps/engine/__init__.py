"""What trials run on: Ray here or on a cluster, processes, resources, and a look before."""
