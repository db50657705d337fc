/* SPDX-License-Identifier: Apache-2.0 */
/* The one request that is made of the kernel beside libibverbs. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <rdma/ib_user_verbs.h>
#include <unistd.h>

#include "verbs/verbs.h"

/*
 * What ibv_rereg_mr asks of the kernel. The library asks only where a device's own part of it takes
 * part, and that of soft-RoCE (rdma-core 44) does not, though its driver can since Linux 6.5.
 */
int iswi_verbs_rereg(struct ibv_mr *mr, struct ibv_pd *pd, int access)
{
	struct ib_uverbs_rereg_mr_resp answer = {0};
	struct {
		struct ib_uverbs_cmd_hdr header;
		struct ib_uverbs_rereg_mr command;
	} request = {
		.header = {.command = IB_USER_VERBS_CMD_REREG_MR,
			   .in_words = sizeof(request) / 4,
			   .out_words = sizeof(answer) / 4},
		.command = {.response = (uintptr_t)&answer,
			    .mr_handle = mr->handle,
			    .flags = IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS,
			    .pd_handle = pd->handle,
			    .access_flags = (uint32_t)access},
	};

	if (write(mr->context->cmd_fd, &request, sizeof(request)) != (ssize_t)sizeof(request))
		return errno != 0 ? -errno : -EIO;
	mr->lkey = answer.lkey;
	mr->rkey = answer.rkey;
	mr->pd = pd;
	return 0;
}
