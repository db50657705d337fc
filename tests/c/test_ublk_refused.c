// SPDX-License-Identifier: Apache-2.0
/*
 * What users are told by the ublk front end where the kernel refuses: this program stands between
 * them and is the kernel (see CMakeLists.txt: --wrap), of any version and with any answer.
 */
#include "check.h"

#ifndef ISW_HAVE_UBLK

int main(void)
{
	SKIP("a build without the ublk front end");
}

#else

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/utsname.h>

#include "frontend/ublk.h"
#include "frontend/ublk_control.h"
#include "frontend_fixture.h"
#include "tests_between.h"

#define CONTROL_PATH "/dev/ublk-control"
#define ENTRIES      4u
#define ALL_FEATURES UINT64_MAX

/* How the kernel is. Codes are negative errnos, 0: it does it. */
struct kernel {
	const char *release;
	int open;
	int ring;
	int features_code;
	uint64_t features;
	int add;
};

static struct kernel kernel;

/* What of a ring the library's inline functions use. */
static struct {
	struct io_uring_sqe sqes[2 * ENTRIES]; /* of 128 bytes each */
	unsigned int sq_head, cq_head;
	struct io_uring_cqe answer;
} ring;

/* ------------------------------------------------------------ in place of the kernel */

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_uname(struct utsname *name);
int __wrap_io_uring_queue_init(unsigned int entries, struct io_uring *made, unsigned int flags);
void __wrap_io_uring_queue_exit(struct io_uring *made);
int __wrap_io_uring_submit(struct io_uring *made);
int __wrap_io_uring_wait_cqe_timeout(struct io_uring *made, struct io_uring_cqe **cqe_out,
				     struct __kernel_timespec *wait);

int __wrap_uname(struct utsname *name)
{
	memset(name, 0, sizeof(*name));
	strcpy(name->release, kernel.release);
	return 0;
}

int __wrap_open(const char *path, int flags, ...)
{
	mode_t mode = 0;
	va_list arguments;

	va_start(arguments, flags);
	if (flags & O_CREAT)
		mode = va_arg(arguments, mode_t);
	va_end(arguments);
	if (strcmp(path, CONTROL_PATH) != 0)
		return __real_open(path, flags, mode);
	if (kernel.open == 0)
		return __real_open("/dev/null", flags);
	errno = -kernel.open;
	return -1;
}

int __wrap_io_uring_queue_init(unsigned int entries, struct io_uring *made, unsigned int flags)
{
	CHECK(entries <= ENTRIES);
	CHECK(flags & IORING_SETUP_SQE128);
	if (kernel.ring != 0)
		return kernel.ring;
	memset(&ring, 0, sizeof(ring));
	memset(made, 0, sizeof(*made));
	made->flags = flags;
	made->sq.sqes = ring.sqes;
	made->sq.khead = &ring.sq_head;
	made->sq.ring_mask = ENTRIES - 1;
	made->sq.ring_entries = ENTRIES;
	made->cq.khead = &ring.cq_head;
	return 0;
}

void __wrap_io_uring_queue_exit(struct io_uring *made)
{
	memset(made, 0, sizeof(*made));
}

static int32_t answer(const struct io_uring_sqe *sqe)
{
	const struct ublksrv_ctrl_cmd *cmd = (const struct ublksrv_ctrl_cmd *)sqe->cmd;

	if (sqe->cmd_op == UBLK_U_CMD_GET_FEATURES) {
		if (kernel.features_code == 0)
			memcpy((void *)(uintptr_t)cmd->addr, &kernel.features,
			       sizeof(kernel.features));
		return kernel.features_code;
	}
	CHECK_EQ(sqe->cmd_op, UBLK_U_CMD_ADD_DEV);
	CHECK(kernel.add != 0);
	return kernel.add;
}

int __wrap_io_uring_submit(struct io_uring *made)
{
	const struct io_uring_sqe *sqe = &made->sq.sqes[2 * (ring.sq_head & (ENTRIES - 1))];

	CHECK_EQ(made->sq.sqe_tail, ++ring.sq_head);
	ring.answer = (struct io_uring_cqe){.user_data = sqe->user_data, .res = answer(sqe)};
	return 1;
}

int __wrap_io_uring_wait_cqe_timeout(struct io_uring *made, struct io_uring_cqe **cqe_out,
				     struct __kernel_timespec *wait)
{
	(void)made;
	(void)wait;
	*cqe_out = &ring.answer;
	return 0;
}

/* ------------------------------------------------------------------------- the tests */

/* Whoever asks whether there can be devices, and who wants one, are told the same. */
static void told(struct kernel now, int code, const char *words)
{
	const struct isw_frontend_config config = {.queues = 1, .identity = 1};
	isw_frontend *frontend = NULL;
	struct isw_error asked = {0}, tried = {0};

	kernel = now;
	if (kernel.release == NULL)
		kernel.release = "6.12.1-amd64";
	CHECK_EQ(isw_ublk_check(&asked), kernel.add == 0 ? code : 0);
	CHECK_EQ(iswi_ublk_ops.start(&engine, &config, &frontend, &tried), code);
	CHECK(frontend == NULL);
	if (kernel.add == 0)
		CHECK(strcmp(asked.text, tried.text) == 0);
	if (strstr(tried.text, words) == NULL) {
		fprintf(stderr, "on %s: \"%s\" is not in: %s\n", kernel.release, words, tried.text);
		exit(1);
	}
	/* No module mends what is too old, or not allowed. */
	CHECK((strstr(tried.text, "modprobe") != NULL) == (code == -ENODEV));
}

static void end(void)
{
	CHECK(!engine.down);
	CHECK_EQ(engine.submitted, 0);
	engine_stop();
}

#define TOLD_TEST(name) BETWEEN_TEST(name, engine_start(HELD, 64), end())

TOLD_TEST(kernels_before_6_5_are_too_old)
{
	const char *old[] = {"4.19.0-27-amd64", "5.15.0", "6.0.19", "6.1.0-27-amd64", "6.4.16-rt"};
	const char *new[] = {"6.5.0", "6.12.9+bpo-amd64", "7.0.0-rc1", "10.1", "unknown"};

	for (size_t i = 0; i < sizeof(old) / sizeof(old[0]); i++) {
		told((struct kernel){.release = old[i], .open = -ENOENT}, -EOPNOTSUPP,
		     "is too old for ublk devices: Linux 6.5 or later is needed");
		told((struct kernel){.release = old[i], .open = -ENOENT}, -EOPNOTSUPP, old[i]);
		/* There is a driver, whatever the number. */
		told((struct kernel){.release = old[i], .open = -EACCES}, -EACCES, "need root");
	}
	for (size_t i = 0; i < sizeof(new) / sizeof(new[0]); i++) {
		told((struct kernel){.release = new[i], .open = -ENOENT}, -ENODEV,
		     "modprobe ublk_drv");
		told((struct kernel){.release = new[i], .open = -ENODEV}, -ENODEV, "container");
	}
}

TOLD_TEST(a_control_device_that_may_not_be_used_is_told)
{
	told((struct kernel){.open = -EACCES}, -EACCES, "need root: " CONTROL_PATH);
	told((struct kernel){.open = -EPERM}, -EPERM, "need root: " CONTROL_PATH);
	told((struct kernel){.open = -EMFILE}, -EMFILE, CONTROL_PATH " cannot be opened");
	told((struct kernel){.features_code = -EPERM}, -EPERM, "refuses ublk devices");
	told((struct kernel){.features_code = -EACCES}, -EACCES, "refuses ublk devices");
	told((struct kernel){.features = ALL_FEATURES, .add = -EPERM}, -EPERM, "a ublk device");
}

TOLD_TEST(io_uring_that_is_off_is_told)
{
	told((struct kernel){.ring = -EPERM}, -EOPNOTSUPP, "/proc/sys/kernel/io_uring_disabled");
	told((struct kernel){.ring = -ENOSYS}, -EOPNOTSUPP, "seccomp profile");
	told((struct kernel){.ring = -ENOMEM}, -ENOMEM, "io_uring for " CONTROL_PATH);
}

TOLD_TEST(a_driver_that_is_too_old_is_told)
{
	told((struct kernel){.features_code = -EINVAL}, -EOPNOTSUPP, "Linux 6.5 or later");
	told((struct kernel){.features = UBLK_F_CMD_IOCTL_ENCODE}, -EOPNOTSUPP, "user recovery");
}

TOLD_TEST(the_limit_of_devices_is_told)
{
	told((struct kernel){.features = ALL_FEATURES, .add = -EACCES}, -ENOSPC, "ublks_max");
	told((struct kernel){.features = ALL_FEATURES, .add = -ENOSPC}, -ENOSPC, "ublks_max");
	told((struct kernel){.features = ALL_FEATURES, .add = -ENOMEM}, -ENOMEM,
	     "the kernel made no ublk device");
}

#endif
