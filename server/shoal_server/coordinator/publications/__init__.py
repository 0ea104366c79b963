"""The WeightSeries service: series of published weights, decided by the leader and kept in etcd."""
