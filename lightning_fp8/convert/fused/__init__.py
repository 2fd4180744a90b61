"""RMSNorms in one kernel each way, and gated MLPs as one autograd function, in models of other libraries."""
