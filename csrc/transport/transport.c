// SPDX-License-Identifier: Apache-2.0
/* The choice among the transports: the only place that names them all. */
#include "transport/rdma.h"
#include "transport/tcp.h"

const struct iswi_transport_ops *iswi_transport_for(const struct isw_remote_config *config)
{
	return config->rdma != NULL ? &iswi_transport_rdma : &iswi_transport_tcp;
}

void iswi_transport_release(const struct isw_remote_config *config)
{
	isw_rdma_offer_destroy(config->rdma);
}
