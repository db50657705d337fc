// SPDX-License-Identifier: Apache-2.0
/* The ublk front end of a build that found no liburing, or kernel headers without ublk. */
#include <errno.h>

#include "frontend/ublk.h"
#include "util/util.h"

const struct iswi_frontend_ops iswi_ublk_ops = {
	.name = "ublk",
	.missing = "this build has no ublk front end: liburing (2.3 or later) or the kernel's "
		   "header linux/ublk_cmd.h was not found when it was compiled; install "
		   "liburing-dev, linux-libc-dev and pkg-config, then install again",
};

static int missing(struct isw_error *error)
{
	return iswi_error(error, -ENOSYS, "%s", iswi_ublk_ops.missing);
}

int isw_ublk_check(struct isw_error *error)
{
	return missing(error);
}

int isw_ublk_info(uint32_t dev_id, struct isw_ublk_info *info_out, struct isw_error *error)
{
	(void)dev_id;
	(void)info_out;
	return missing(error);
}

int isw_ublk_fail(uint32_t dev_id, uint64_t identity, uint32_t wait_ms_max,
		  isw_frontend **frontend_out, struct isw_error *error)
{
	(void)dev_id;
	(void)identity;
	(void)wait_ms_max;
	*frontend_out = NULL;
	return missing(error);
}

int isw_ublk_remove(uint32_t dev_id, uint64_t identity, struct isw_error *error)
{
	(void)dev_id;
	(void)identity;
	return missing(error);
}
