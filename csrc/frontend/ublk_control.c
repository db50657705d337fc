// SPDX-License-Identifier: Apache-2.0
#include "frontend/ublk_control.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "util/util.h"

#define CONTROL_PATH "/dev/ublk-control"
/* To read it makes the kernel run something on every processor's system work queue, and wait. */
#define SETTLE_PATH "/proc/sys/vm/stat_refresh"
/* Starting reads the partition table through our own queues, from a disk that may be slow. */
#define START_SECONDS_MAX 60
/* Until the kernel has let go of what a closed ring held, which takes milliseconds. */
#define DEL_SECONDS_MAX 5
/* Where memory is short the kernel may need us before it has a worker for it. */
#define SETTLE_SECONDS_MAX 1
#define NO_LIMIT           0
#define FEATURES_NEEDED                                                                            \
	(UBLK_F_USER_RECOVERY | UBLK_F_USER_RECOVERY_REISSUE | UBLK_F_CMD_IOCTL_ENCODE)

struct command {
	uint32_t op;
	uint32_t dev_id;
	void *buffer; /* in or out; such a command has no time limit */
	uint16_t bytes;
	uint64_t data;
	unsigned int seconds_max; /* NO_LIMIT */
};

/* Waits for the answer to the last command; an earlier one that was given up may come first. */
static int wait_answer(struct iswi_ublk_control *control, unsigned int seconds_max)
{
	const uint64_t until_ns = iswi_now_ns() + seconds_max * 1000000000ull;

	for (;;) {
		struct __kernel_timespec tick = {.tv_sec = 1};
		struct io_uring_cqe *cqe;
		int result = io_uring_wait_cqe_timeout(&control->ring, &cqe, &tick);

		if (result == 0) {
			bool ours = io_uring_cqe_get_data64(cqe) == control->sequence;

			result = cqe->res;
			io_uring_cqe_seen(&control->ring, cqe);
			if (ours)
				return result;
		} else if (result != -ETIME && result != -EINTR && result != -EAGAIN) {
			return result;
		}
		if (seconds_max != NO_LIMIT && iswi_now_ns() > until_ns)
			return -ETIMEDOUT;
	}
}

static struct io_uring_sqe *next_sqe(struct iswi_ublk_control *control)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&control->ring);

	/* 128 bytes: liburing clears only the first half. */
	if (sqe != NULL)
		memset(sqe, 0, 2 * sizeof(*sqe));
	return sqe;
}

static int submit(struct iswi_ublk_control *control, struct io_uring_sqe *sqe,
		  unsigned int seconds_max)
{
	int result;

	io_uring_sqe_set_data64(sqe, ++control->sequence);
	do
		result = io_uring_submit(&control->ring);
	while (result == -EINTR || result == -EAGAIN);
	return result < 0 ? result : wait_answer(control, seconds_max);
}

static int run(struct iswi_ublk_control *control, const struct command *command)
{
	struct io_uring_sqe *sqe = next_sqe(control);
	struct ublksrv_ctrl_cmd *cmd;

	if (sqe == NULL)
		return -EBUSY;
	sqe->opcode = IORING_OP_URING_CMD;
	sqe->fd = control->fd;
	sqe->cmd_op = command->op;
	cmd = (struct ublksrv_ctrl_cmd *)sqe->cmd;
	cmd->dev_id = command->dev_id;
	cmd->queue_id = UINT16_MAX;
	cmd->addr = (uintptr_t)command->buffer;
	cmd->len = command->bytes;
	cmd->data[0] = command->data;
	return submit(control, sqe, command->seconds_max);
}

int iswi_ublk_add(struct iswi_ublk_control *control, struct ublksrv_ctrl_dev_info *info)
{
	return run(control, &(struct command){.op = UBLK_U_CMD_ADD_DEV,
					      .dev_id = info->dev_id,
					      .buffer = info,
					      .bytes = sizeof(*info)});
}

int iswi_ublk_get_info(struct iswi_ublk_control *control, uint32_t dev_id,
		       struct ublksrv_ctrl_dev_info *info_out)
{
	return run(control, &(struct command){.op = UBLK_U_CMD_GET_DEV_INFO,
					      .dev_id = dev_id,
					      .buffer = info_out,
					      .bytes = sizeof(*info_out)});
}

int iswi_ublk_set_params(struct iswi_ublk_control *control, uint32_t dev_id,
			 struct ublk_params *params)
{
	params->len = sizeof(*params);
	return run(control, &(struct command){.op = UBLK_U_CMD_SET_PARAMS,
					      .dev_id = dev_id,
					      .buffer = params,
					      .bytes = sizeof(*params)});
}

int iswi_ublk_get_params(struct iswi_ublk_control *control, uint32_t dev_id,
			 struct ublk_params *params_out)
{
	memset(params_out, 0, sizeof(*params_out));
	params_out->len = sizeof(*params_out);
	return run(control, &(struct command){.op = UBLK_U_CMD_GET_PARAMS,
					      .dev_id = dev_id,
					      .buffer = params_out,
					      .bytes = sizeof(*params_out)});
}

int iswi_ublk_start(struct iswi_ublk_control *control, uint32_t dev_id)
{
	return run(control, &(struct command){.op = UBLK_U_CMD_START_DEV,
					      .dev_id = dev_id,
					      .data = (uint64_t)getpid(),
					      .seconds_max = START_SECONDS_MAX});
}

int iswi_ublk_start_recovery(struct iswi_ublk_control *control, uint32_t dev_id)
{
	return run(control, &(struct command){.op = UBLK_U_CMD_START_USER_RECOVERY,
					      .dev_id = dev_id,
					      .seconds_max = START_SECONDS_MAX});
}

int iswi_ublk_settle(struct iswi_ublk_control *control)
{
	struct io_uring_sqe *sqe;
	int result;

	if (control->settle_fd < 0)
		return -ENOENT;
	sqe = next_sqe(control);
	if (sqe == NULL)
		return -EBUSY;
	io_uring_prep_read(sqe, control->settle_fd, &control->settle_byte, 1, 0);
	result = submit(control, sqe, SETTLE_SECONDS_MAX);
	return result < 0 ? result : 0;
}

int iswi_ublk_end_recovery(struct iswi_ublk_control *control, uint32_t dev_id)
{
	return run(control, &(struct command){.op = UBLK_U_CMD_END_USER_RECOVERY,
					      .dev_id = dev_id,
					      .data = (uint64_t)getpid(),
					      .seconds_max = START_SECONDS_MAX});
}

int iswi_ublk_stop(struct iswi_ublk_control *control, uint32_t dev_id)
{
	return run(control, &(struct command){.op = UBLK_U_CMD_STOP_DEV,
					      .dev_id = dev_id,
					      .seconds_max = NO_LIMIT});
}

int iswi_ublk_del(struct iswi_ublk_control *control, uint32_t dev_id)
{
	int err = run(control, &(struct command){.op = UBLK_U_CMD_DEL_DEV,
						 .dev_id = dev_id,
						 .seconds_max = DEL_SECONDS_MAX});

	return err == -ETIMEDOUT ? 0 : err;
}

/* --------------------------------------------------------------------- opening */

/* The driver came with Linux 6.0, what we need of it with 6.5: no module would help. */
static bool is_too_old(const struct utsname *kernel)
{
	unsigned int major, minor;

	if (sscanf(kernel->release, "%u.%u", &major, &minor) != 2)
		return false;
	return major < 6 || (major == 6 && minor < 5);
}

static int explain_open(int code, struct isw_error *error)
{
	struct utsname kernel;

	/* First: there is a driver, whatever the number of the kernel. */
	if (code == -EACCES || code == -EPERM)
		return iswi_error(error, code, "ublk devices need root: " CONTROL_PATH ": %s",
				  strerror(-code));
	if (uname(&kernel) == 0 && is_too_old(&kernel))
		return iswi_error(error, -EOPNOTSUPP,
				  "this kernel (%s) is too old for ublk devices: Linux 6.5 or "
				  "later is needed",
				  kernel.release);
	if (code == -ENOENT || code == -ENODEV || code == -ENXIO)
		return iswi_error(error, -ENODEV,
				  "there is no " CONTROL_PATH ": load the kernel's module with "
				  "`modprobe ublk_drv`; in a container, pass the device in");
	return iswi_error(error, code, CONTROL_PATH " cannot be opened: %s", strerror(-code));
}

static int explain_ring(int code, struct isw_error *error)
{
	/* -EPERM is not for want of rights: who may open the control device has them. */
	if (code == -EPERM || code == -ENOSYS)
		return iswi_error(error, -EOPNOTSUPP,
				  "ublk devices need io_uring, which is switched off here: look at "
				  "/proc/sys/kernel/io_uring_disabled, and in a container at its "
				  "seccomp profile");
	return iswi_error(error, code, "io_uring for " CONTROL_PATH ": %s", strerror(-code));
}

static int check_features(struct iswi_ublk_control *control, struct isw_error *error)
{
	int err = run(control, &(struct command){.op = UBLK_U_CMD_GET_FEATURES,
						 .dev_id = UINT32_MAX,
						 .buffer = &control->features,
						 .bytes = UBLK_FEATURES_LEN});

	if (err == -EPERM || err == -EACCES)
		return iswi_error(error, err, "the kernel refuses ublk devices: %s",
				  strerror(-err));
	if (err != 0)
		return iswi_error(error, -EOPNOTSUPP,
				  "this kernel's ublk driver is too old (its features cannot be "
				  "asked for: %s): Linux 6.5 or later is needed",
				  strerror(-err));
	if ((control->features & FEATURES_NEEDED) != FEATURES_NEEDED)
		return iswi_error(error, -EOPNOTSUPP,
				  "this kernel's ublk driver lacks user recovery (features %#llx): "
				  "Linux 6.5 or later is needed",
				  (unsigned long long)control->features);
	return 0;
}

int iswi_ublk_control_open(struct iswi_ublk_control *control, struct isw_error *error)
{
	int err;

	memset(control, 0, sizeof(*control));
	control->fd = open(CONTROL_PATH, O_RDWR | O_CLOEXEC);
	if (control->fd < 0)
		return explain_open(-errno, error);
	err = io_uring_queue_init(4, &control->ring, IORING_SETUP_SQE128);
	if (err != 0) {
		err = explain_ring(err, error);
		goto err_fd;
	}
	err = check_features(control, error);
	if (err != 0)
		goto err_ring;
	control->settle_fd = open(SETTLE_PATH, O_RDONLY | O_CLOEXEC); /* can be done without */
	return 0;

err_ring:
	io_uring_queue_exit(&control->ring);
err_fd:
	close(control->fd);
	control->fd = -1;
	return err;
}

void iswi_ublk_control_close(struct iswi_ublk_control *control)
{
	io_uring_queue_exit(&control->ring);
	if (control->settle_fd >= 0)
		close(control->settle_fd);
	close(control->fd);
	control->settle_fd = -1;
	control->fd = -1;
}
