/* SPDX-License-Identifier: Apache-2.0 */
/* RDMA in a build that found no headers of libibverbs: nothing can be opened, so nothing is made.
 */
#include <errno.h>

#include "util/util.h"
#include "verbs/verbs.h"

static int none_ports(struct isw_rdma_port *ports_out, uint32_t max, struct isw_error *error)
{
	(void)ports_out;
	(void)max;
	return iswi_error(error, -EOPNOTSUPP,
			  "this build has no RDMA: infiniband/verbs.h was not found when it was "
			  "compiled; install libibverbs-dev, then install again");
}

static int none_open(const char *device, struct iswi_vdev **dev_out, struct isw_error *error)
{
	(void)device;
	(void)dev_out;
	return none_ports(NULL, 0, error);
}

const struct iswi_verbs iswi_verbs_system = {
	.name = "none",
	.ports = none_ports,
	.open = none_open,
};
