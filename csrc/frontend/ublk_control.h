/* SPDX-License-Identifier: Apache-2.0 */
/* Commands to /dev/ublk-control: making, starting, taking over and removing ublk devices. */
#ifndef ISWI_UBLK_CONTROL_H
#define ISWI_UBLK_CONTROL_H

#include <liburing.h>
#include <stdint.h>

#include "frontend/ublk_abi.h"
#include "isw.h"

struct iswi_ublk_control {
	struct io_uring ring;
	int fd;
	int settle_fd;     /* for iswi_ublk_settle, or -1 */
	char settle_byte;  /* never written: what is read has no bytes */
	uint64_t sequence; /* of the last command */
	uint64_t features; /* UBLK_F_*: what this kernel's driver knows */
};

/* Opens the control device and checks that the driver has what we need. Fills error. */
int iswi_ublk_control_open(struct iswi_ublk_control *control, struct isw_error *error);
void iswi_ublk_control_close(struct iswi_ublk_control *control);

/*
 * One command, by one thread at a time; blocking. 0 or what the driver answers, a negative errno.
 * info->dev_id: the device, or UINT32_MAX to have one chosen, which is stored there.
 */
int iswi_ublk_add(struct iswi_ublk_control *control, struct ublksrv_ctrl_dev_info *info);
int iswi_ublk_get_info(struct iswi_ublk_control *control, uint32_t dev_id,
		       struct ublksrv_ctrl_dev_info *info_out);
int iswi_ublk_set_params(struct iswi_ublk_control *control, uint32_t dev_id,
			 struct ublk_params *params);
int iswi_ublk_get_params(struct iswi_ublk_control *control, uint32_t dev_id,
			 struct ublk_params *params_out);
/* The four that wait for others; -ETIMEDOUT: the driver has not answered, and goes on. */
int iswi_ublk_start(struct iswi_ublk_control *control, uint32_t dev_id);
int iswi_ublk_start_recovery(struct iswi_ublk_control *control, uint32_t dev_id);
int iswi_ublk_end_recovery(struct iswi_ublk_control *control, uint32_t dev_id);
/*
 * Waits until what the driver had put on the system's work queue before this call has been done.
 * 0, or why that is not known: nobody could be asked (-ENOENT), or it takes long (-ETIMEDOUT).
 */
int iswi_ublk_settle(struct iswi_ublk_control *control);
/*
 * Ends the block device. Waits without a limit for requests in progress: only while queues serve
 * it, or when nobody does.
 */
int iswi_ublk_stop(struct iswi_ublk_control *control, uint32_t dev_id);
/*
 * Every ring must be closed, every queue unmapped. Where somebody still has the block device open,
 * the device goes when they close it: that counts as success.
 */
int iswi_ublk_del(struct iswi_ublk_control *control, uint32_t dev_id);

#endif
