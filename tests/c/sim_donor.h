/* SPDX-License-Identifier: Apache-2.0 */
/* What Python does when a simulated donor is there again. */
#ifndef ISW_TEST_SIM_DONOR_H
#define ISW_TEST_SIM_DONOR_H

#include "sim/isw_sim.h"

/* New connections, and the slabs that are suspended there go on. The first error, or 0. */
static inline int sim_donor_returns(isw_engine *e, uint32_t remote)
{
	struct isw_slab_info info;
	int code = isw_sim_remote_reconnect(e, remote);

	for (uint32_t slab = 0; !code && isw_engine_slabs(e, slab, 1, &info); slab++) {
		if (info.state == ISW_SLAB_SUSPENDED && info.remote == remote)
			code = isw_slab_resume(e, slab, remote, info.generation);
		if (info.source_state == ISW_SLAB_SUSPENDED && info.source_remote == remote)
			code = isw_slab_resume(e, slab, remote, info.source_generation);
	}
	return code;
}

#endif
