"""The Samples service: a ledger for each job, answered from memory and written to etcd in the
background."""
