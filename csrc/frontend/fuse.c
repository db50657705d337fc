/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The FUSE front end: a file system with one file, `disk`, whose bytes are the device's. A loop
 * device with direct I/O on that file is the block device.
 *
 * libfuse answers what is rare (INIT, LOOKUP, GETATTR, ...). Its way of
 * handling a request allocates, so page requests never reach it: our one thread reads /dev/fuse
 * into buffers made beforehand and fuse_pages.c handles READ, WRITE, FSYNC and FALLOCATE. Their
 * answers are written by the engine's threads, in any order.
 *
 * A mount outlives its process as long as somebody has a copy of the connection's descriptor. A
 * successor lets libfuse see the kernel's first message once more, does not send its answer, and
 * has the kernel ask again what was not answered (FUSE_NOTIFY_RESEND).
 */
#define FUSE_USE_VERSION 34

#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <linux/fuse.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include "frontend/fuse_frontend.h"
#include "util/util.h"

#define DISK_NAME "disk"
/* Linux 6.9; older headers lack both. */
#define NOTIFY_RESEND 7 /* FUSE_NOTIFY_RESEND */
#ifndef FUSE_INIT_EXT
#define FUSE_INIT_EXT (1 << 30)
#endif
#define FLAGS2_HAS_RESEND (1u << 7) /* FUSE_HAS_RESEND >> 32 */
/* fuse_session_custom_io() */
#define CAN_HAND_OVER (FUSE_VERSION >= FUSE_MAKE_VERSION(3, 13))
/*
 * Largest READ and WRITE asked of the kernel. Every buffer has this size and all of them are
 * locked in memory, and swap asks for far less, so more would only cost.
 *
 * The kernel cuts a direct I/O after that many pages of the caller's memory. When that memory is
 * not page aligned the cut is not either, and the request is refused with EINVAL; so whoever puts
 * a loop device on `disk` limits that device's requests to half of this (max_sectors_kb).
 */
#define REQUEST_BYTES_MAX (256u * 1024u)
#define BACKGROUND_MIN    64u
#define BACKGROUND_MAX    4096u
#define START_SECONDS_MAX 10
/* Names and sizes never change while mounted. */
#define ATTR_SECONDS 86400.0

/* -------------------------------------------------------- the session thread */

static void wait_readable(struct iswi_fuse *fe)
{
	struct pollfd fds[2] = {
		{.fd = fe->fd, .events = POLLIN},
		{.fd = fe->wake_fd, .events = POLLIN},
	};

	/* Any failure shows again in the read that follows. */
	(void)poll(fds, 2, -1);
}

/* Returns the message's length, or -ECANCELED when stopping, or why the session is over. */
static ssize_t receive(struct iswi_fuse *fe, struct iswi_fuse_slot *slot)
{
	ssize_t got;

	while (!atomic_load_explicit(&fe->stopping, memory_order_acquire)) {
		got = read(fe->fd, iswi_fuse_message(slot), iswi_fuse_message_bytes_max(fe));
		if (got >= (ssize_t)sizeof(struct fuse_in_header))
			return got;
		if (got >= 0)
			return -EIO;
		if (errno == EAGAIN) {
			iswi_engine_unplug(fe->engine, &fe->plug);
			wait_readable(fe);
		} else if (errno != EINTR && errno != ENOENT) { /* ENOENT: aborted before we read */
			return -errno;
		}
	}
	return -ECANCELED;
}

static enum iswi_fuse_phase set_phase(struct iswi_fuse *fe, enum iswi_fuse_phase phase)
{
	enum iswi_fuse_phase before;

	pthread_mutex_lock(&fe->lock);
	before = fe->phase;
	fe->phase = phase;
	pthread_cond_broadcast(&fe->changed);
	pthread_mutex_unlock(&fe->lock);
	return before;
}

/* Sends the message where it belongs. 0, or why the session is over. */
static int dispatch(struct iswi_fuse *fe, struct iswi_fuse_slot **slot, size_t bytes)
{
	struct fuse_buf message = {.size = bytes, .mem = iswi_fuse_message(*slot)};
	uint32_t opcode = ((struct fuse_in_header *)message.mem)->opcode;

	switch (iswi_fuse_handle(fe, *slot, bytes)) {
	case ISWI_FUSE_TAKEN:
		*slot = NULL;
		break;
	case ISWI_FUSE_ANSWERED:
		break;
	case ISWI_FUSE_NOT_OURS:
		iswi_engine_unplug(fe->engine, &fe->plug);
		if (opcode == FUSE_INIT && bytes <= sizeof(fe->init)) {
			memcpy(fe->init, message.mem, bytes);
			fe->init_bytes = bytes;
		}
		fuse_session_process_buf(fe->session, &message);
		if (fuse_session_exited(fe->session))
			return -EPROTO; /* libfuse could not agree with the kernel */
		if (opcode == FUSE_INIT)
			set_phase(fe, ISWI_FUSE_SERVING);
		break;
	}
	return 0;
}

static void *session_thread(void *arg)
{
	struct iswi_fuse *fe = arg;
	struct iswi_fuse_slot *slot = NULL;
	enum iswi_fuse_phase phase;
	ssize_t got;
	int err = 0;

	iswi_thread_urgent();
	while (!err) {
		if (!slot)
			slot = iswi_fuse_slot_take(fe);
		got = receive(fe, slot);
		err = got < 0 ? (int)got : dispatch(fe, &slot, (size_t)got);
	}
	iswi_engine_unplug(fe->engine, &fe->plug);
	if (slot)
		iswi_fuse_slot_put(slot);
	phase = set_phase(fe, ISWI_FUSE_ENDED);
	if (phase == ISWI_FUSE_SERVING && err != -ECANCELED &&
	    !atomic_load_explicit(&fe->leaving, memory_order_relaxed))
		iswi_engine_frontend_down(fe->engine, err);
	return NULL;
}

/* ------------------------------------------- what libfuse handles, on our thread */

static void op_init(void *userdata, struct fuse_conn_info *conn)
{
	struct iswi_fuse *fe = userdata;

	conn->max_write = fe->request_bytes;
	conn->max_read = fe->request_bytes; /* libfuse wants to hear it again, as in fe_mount */
	conn->max_readahead = 0;
	conn->max_background = fe->background_max;
	conn->congestion_threshold = fe->background_max;
	conn->want |= conn->capable & FUSE_CAP_ASYNC_DIO;
	conn->want &= ~(unsigned int)(FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE |
				      FUSE_CAP_SPLICE_MOVE | FUSE_CAP_ATOMIC_O_TRUNC);
}

static bool fill_attr(const struct iswi_fuse *fe, fuse_ino_t node, struct stat *attr_out)
{
	memset(attr_out, 0, sizeof(*attr_out));
	attr_out->st_ino = node;
	attr_out->st_blksize = ISW_PAGE_BYTES;
	attr_out->st_atim = fe->mounted;
	attr_out->st_mtim = fe->mounted;
	attr_out->st_ctim = fe->mounted;
	if (node == FUSE_ROOT_ID) {
		attr_out->st_mode = S_IFDIR | 0700;
		attr_out->st_nlink = 2;
		return true;
	}
	attr_out->st_mode = S_IFREG | 0600;
	attr_out->st_nlink = 1;
	attr_out->st_size = (off_t)fe->size_bytes;
	attr_out->st_blocks = (blkcnt_t)(fe->size_bytes / 512);
	return node == ISWI_FUSE_DISK_NODE;
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	struct iswi_fuse *fe = fuse_req_userdata(req);
	struct fuse_entry_param entry = {.ino = ISWI_FUSE_DISK_NODE,
					 .attr_timeout = ATTR_SECONDS,
					 .entry_timeout = ATTR_SECONDS};

	if (parent != FUSE_ROOT_ID || strcmp(name, DISK_NAME) != 0) {
		fuse_reply_err(req, ENOENT);
		return;
	}
	fill_attr(fe, ISWI_FUSE_DISK_NODE, &entry.attr);
	fuse_reply_entry(req, &entry);
}

static void op_getattr(fuse_req_t req, fuse_ino_t node, struct fuse_file_info *file)
{
	struct iswi_fuse *fe = fuse_req_userdata(req);
	struct stat attr;

	(void)file;
	if (fill_attr(fe, node, &attr))
		fuse_reply_attr(req, &attr, ATTR_SECONDS);
	else
		fuse_reply_err(req, ENOENT);
}

static void op_setattr(fuse_req_t req, fuse_ino_t node, struct stat *wanted, int to_set,
		       struct fuse_file_info *file)
{
	struct iswi_fuse *fe = fuse_req_userdata(req);

	if (to_set & FUSE_SET_ATTR_SIZE && (uint64_t)wanted->st_size != fe->size_bytes)
		fuse_reply_err(req, EPERM); /* the size is the device's */
	else if (to_set & (FUSE_SET_ATTR_MODE | FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID))
		fuse_reply_err(req, EPERM);
	else
		op_getattr(req, node, file);
}

static void op_readdir(fuse_req_t req, fuse_ino_t node, size_t size, off_t offset,
		       struct fuse_file_info *file)
{
	static const struct {
		const char *name;
		fuse_ino_t node;
	} entries[] = {{".", FUSE_ROOT_ID}, {"..", FUSE_ROOT_ID}, {DISK_NAME, ISWI_FUSE_DISK_NODE}};
	struct iswi_fuse *fe = fuse_req_userdata(req);
	char buf[256];
	size_t used = 0;
	off_t i;

	(void)node;
	(void)file;
	size = ISWI_MIN(size, sizeof(buf));
	for (i = offset; i >= 0 && i < (off_t)ISWI_ARRAY_LEN(entries); i++) {
		struct stat attr;
		size_t entry;

		fill_attr(fe, entries[i].node, &attr);
		entry = fuse_add_direntry(req, buf + used, size - used, entries[i].name, &attr,
					  i + 1);
		if (entry > size - used)
			break;
		used += entry;
	}
	fuse_reply_buf(req, buf, used);
}

static void op_statfs(fuse_req_t req, fuse_ino_t node)
{
	struct iswi_fuse *fe = fuse_req_userdata(req);
	/* The loop driver takes its discard granularity from f_bsize. */
	struct statvfs stat = {.f_bsize = ISW_PAGE_BYTES,
			       .f_frsize = ISW_PAGE_BYTES,
			       .f_blocks = fe->size_bytes / ISW_PAGE_BYTES,
			       .f_files = 2,
			       .f_namemax = 255};

	(void)node;
	fuse_reply_statfs(req, &stat);
}

static const struct fuse_lowlevel_ops session_ops = {
	.init = op_init,
	.lookup = op_lookup,
	.getattr = op_getattr,
	.setattr = op_setattr,
	.readdir = op_readdir,
	.statfs = op_statfs,
};

/* -------------------------------------------------------------- start and end */

/* Lazy: somebody may have the file open. */
static void fe_unmount(struct iswi_fuse *fe)
{
	(void)umount2(fe->mountpoint, MNT_DETACH | UMOUNT_NOFOLLOW);
	fe->has_mount = false;
}

/* Step two and three of destroy, also for a front end that never came to serve. */
static void fe_free(struct iswi_fuse *fe)
{
	/*
	 * This closes the connection's descriptor, which aborts whatever the kernel has still
	 * queued: unmounting cannot wait for us then.
	 */
	if (fe->session)
		fuse_session_destroy(fe->session);
	if (fe->has_mount)
		fe_unmount(fe);
	if (fe->memory)
		munmap(fe->memory, fe->slot_bytes * fe->slots_max);
	if (fe->wake_fd >= 0)
		close(fe->wake_fd);
	free(fe->mountpoint);
	pthread_cond_destroy(&fe->changed);
	pthread_mutex_destroy(&fe->lock);
	free(fe);
}

static void fe_stop(struct iswi_fuse *fe)
{
	uint64_t one = 1;

	atomic_store_explicit(&fe->stopping, true, memory_order_release);
	if (write(fe->wake_fd, &one, sizeof(one)) < 0) {
		/* Only a full counter could fail, and then it is readable all the same. */
	}
	pthread_join(fe->thread, NULL);
	pthread_mutex_lock(&fe->lock);
	while (fe->slots_free < fe->slots_max)
		pthread_cond_wait(&fe->changed, &fe->lock);
	pthread_mutex_unlock(&fe->lock);
}

static void fe_destroy(isw_frontend *frontend)
{
	struct iswi_fuse *fe = ISWI_CONTAINER(frontend, struct iswi_fuse, base);

	/*
	 * While we still answer: closing our descriptor ends nothing as long as somebody else has a
	 * copy, and unmounting a file system that nobody serves could wait for ever.
	 */
	if (fe->started) {
		atomic_store_explicit(&fe->leaving, true, memory_order_relaxed);
		fe_unmount(fe);
		fe_stop(fe);
	}
	fe_free(fe);
}

static int fe_create(isw_engine *engine, const char *mountpoint, struct iswi_fuse **fe_out)
{
	pthread_condattr_t attr;
	struct iswi_fuse *fe = calloc(1, sizeof(*fe));
	int err;

	if (!fe)
		return -ENOMEM;
	fe->base.ops = &iswi_fuse_ops;
	fe->engine = engine;
	fe->mountpoint = strdup(mountpoint);
	fe->fd = -1;
	fe->size_bytes = iswi_engine_size_bytes(engine);
	fe->request_bytes = ISWI_MIN(iswi_engine_request_bytes_max(engine), REQUEST_BYTES_MAX);
	fe->request_bytes -= fe->request_bytes % ISW_PAGE_BYTES;
	fe->slots_max = iswi_engine_requests_max(engine);
	fe->background_max = ISWI_MIN(ISWI_MAX(fe->slots_max, BACKGROUND_MIN), BACKGROUND_MAX);
	clock_gettime(CLOCK_REALTIME, &fe->mounted);
	pthread_mutex_init(&fe->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&fe->changed, &attr);
	pthread_condattr_destroy(&attr);
	fe->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	err = fe->wake_fd < 0 ? -errno : fe->mountpoint ? 0 : -ENOMEM;
	if (!err && (fe->request_bytes == 0 || fe->slots_max == 0))
		err = -EINVAL;
	if (!err)
		err = iswi_fuse_slots_init(fe);
	if (err) {
		fe_free(fe);
		return err;
	}
	*fe_out = fe;
	return 0;
}

static struct fuse_session *new_session(struct iswi_fuse *fe)
{
	char options[32];
	char *argv[] = {"infiniswap", "-o", options};
	struct fuse_args args = FUSE_ARGS_INIT(3, argv);
	struct fuse_session *session;

	snprintf(options, sizeof(options), "max_read=%u", fe->request_bytes);
	session = fuse_session_new(&args, &session_ops, sizeof(session_ops), fe);
	fuse_opt_free_args(&args);
	return session;
}

static int open_connection(struct isw_error *error)
{
	int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC | O_NONBLOCK);
	int err = -errno;

	if (fd >= 0)
		return fd;
	return iswi_error(error, err,
			  "/dev/fuse cannot be used (%s): load the kernel module with "
			  "`modprobe fuse`; in a container, pass the device in",
			  strerror(-err));
}

/* Not left to libfuse, which tells the reason of a failure to standard error only. */
static int fe_mount(struct iswi_fuse *fe, struct isw_error *error)
{
	char text[128];
	int fd = open_connection(error), err;

	if (fd < 0)
		return fd;
	snprintf(text, sizeof(text), "fd=%d,rootmode=40000,user_id=%u,group_id=%u,max_read=%u", fd,
		 (unsigned int)geteuid(), (unsigned int)getegid(), fe->request_bytes);
	if (mount("infiniswap", fe->mountpoint, "fuse.infiniswap", MS_NOSUID | MS_NODEV | MS_NOEXEC,
		  text) != 0) {
		err = iswi_error(error, -errno,
				 "the kernel refuses to mount a file system at %s: %s",
				 fe->mountpoint, strerror(errno));
		goto err_close;
	}
	fe->has_mount = true;
	fe->session = new_session(fe);
	snprintf(text, sizeof(text), "/dev/fd/%d", fd);
	if (!fe->session || fuse_session_mount(fe->session, text) != 0) {
		err = iswi_error(error, -ENOMEM, "libfuse could not make a session");
		goto err_close;
	}
	fe->fd = fd; /* the session's from here on */
	return 0;

err_close:
	close(fd);
	return err;
}

/* Until the kernel and libfuse have agreed (INIT). */
static int wait_serving(struct iswi_fuse *fe)
{
	struct timespec until;
	int err = 0;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += START_SECONDS_MAX;
	pthread_mutex_lock(&fe->lock);
	while (fe->phase == ISWI_FUSE_STARTING && err == 0)
		err = -pthread_cond_timedwait(&fe->changed, &fe->lock, &until);
	if (fe->phase == ISWI_FUSE_ENDED)
		err = -EPROTO;
	else if (fe->phase == ISWI_FUSE_SERVING)
		err = 0;
	pthread_mutex_unlock(&fe->lock);
	return err;
}

static int fe_start(isw_engine *engine, const struct isw_frontend_config *config,
		    isw_frontend **frontend_out, struct isw_error *error)
{
	struct iswi_fuse *fe;
	int err = fe_create(engine, config->path, &fe);

	if (err)
		return iswi_error(error, err, "the FUSE front end's buffers: %s", strerror(-err));
	err = fe_mount(fe, error);
	if (err)
		goto err_free;
	err = iswi_thread_start(&fe->thread, "isw-fuse", session_thread, fe);
	if (err) {
		iswi_error(error, err, "the FUSE front end's thread: %s", strerror(-err));
		goto err_free;
	}
	err = wait_serving(fe);
	if (err) {
		iswi_error(error, err, "the kernel's FUSE and libfuse did not agree at %s: %s",
			   config->path, strerror(-err));
		goto err_stop;
	}
	fe->started = true;
	*frontend_out = &fe->base;
	return 0;

err_stop:
	fe_stop(fe);
err_free:
	fe_free(fe);
	return err;
}

/* ------------------------------------------------------------------- succession */

static bool has_resend(const struct iswi_fuse *fe)
{
	const struct fuse_init_in *init = (const void *)(fe->init + sizeof(struct fuse_in_header));

	return fe->init_bytes >= sizeof(struct fuse_in_header) + sizeof(*init) &&
	       init->flags & FUSE_INIT_EXT && init->flags2 & FLAGS2_HAS_RESEND;
}

static int fe_handover(isw_frontend *frontend, int32_t *fd_out, void *note_out,
		       struct isw_error *error)
{
	struct iswi_fuse *fe = ISWI_CONTAINER(frontend, struct iswi_fuse, base);

	if (!CAN_HAND_OVER)
		return iswi_error(error, -EOPNOTSUPP,
				  "libfuse is older than 3.13, so no other process can take the "
				  "connection to the kernel over");
	if (!has_resend(fe))
		return iswi_error(error, -EOPNOTSUPP,
				  "this kernel cannot ask again what a dead process has not "
				  "answered (FUSE_NOTIFY_RESEND, Linux 6.9)");
	memcpy(note_out, fe->init, fe->init_bytes);
	*fd_out = fe->fd;
	return (int)fe->init_bytes;
}

#if CAN_HAND_OVER
static ssize_t answer(int fd, struct iovec *parts, int count, void *userdata)
{
	const struct iswi_fuse *fe = userdata;
	ssize_t bytes = 0;

	if (!fe->replaying)
		return writev(fd, parts, count);
	for (int i = 0; i < count; i++)
		bytes += (ssize_t)parts[i].iov_len;
	return bytes;
}

static ssize_t never_read(int fd, void *data, size_t bytes, void *userdata)
{
	(void)fd;
	(void)data;
	(void)bytes;
	(void)userdata;
	errno = ENOSYS;
	return -1;
}

/* libfuse believes that it has just mounted. Our thread does not run yet. */
static int fe_replay(struct iswi_fuse *fe, struct isw_error *error)
{
	struct fuse_buf message = {.size = fe->init_bytes, .mem = fe->init};

	fe->replaying = true;
	fuse_session_process_buf(fe->session, &message);
	fe->replaying = false;
	if (fuse_session_exited(fe->session))
		return iswi_error(error, -EPROTO,
				  "libfuse does not accept what the kernel had said to the "
				  "predecessor");
	set_phase(fe, ISWI_FUSE_SERVING);
	return 0;
}

static int ask_again(const struct iswi_fuse *fe)
{
	struct fuse_out_header head = {.len = sizeof(head), .error = NOTIFY_RESEND};

	return write(fe->fd, &head, sizeof(head)) == (ssize_t)sizeof(head) ? 0 : -errno;
}

static int fe_prepare(isw_engine *engine, const struct isw_frontend_config *config,
		      isw_frontend **frontend_out, struct isw_error *error)
{
	struct iswi_fuse *fe;
	int err = fe_create(engine, config->path, &fe);

	if (err)
		return iswi_error(error, err, "the FUSE front end's buffers: %s", strerror(-err));
	if (config->note_bytes > sizeof(fe->init)) {
		fe_free(fe);
		return iswi_error(error, -EINVAL, "the kernel's first message is too long");
	}
	memcpy(fe->init, config->note, config->note_bytes);
	fe->init_bytes = config->note_bytes;
	fe->session = new_session(fe);
	if (!fe->session) {
		fe_free(fe);
		return iswi_error(error, -ENOMEM, "libfuse could not make a session");
	}
	*frontend_out = &fe->base;
	return 0;
}

static int fe_serve(isw_frontend *frontend, int32_t fd, struct isw_error *error)
{
	static const struct fuse_custom_io io = {.writev = answer, .read = never_read};
	struct iswi_fuse *fe = ISWI_CONTAINER(frontend, struct iswi_fuse, base);
	int own, err;

	if (fe->fd >= 0)
		return iswi_error(error, -EINVAL, "this FUSE front end serves a mount already");
	own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (own < 0)
		return iswi_error(error, -errno, "the connection cannot be served: %s",
				  strerror(errno));
	if (fuse_session_custom_io(fe->session, &io, own) != 0) {
		close(own);
		return iswi_error(error, -EINVAL, "libfuse does not take the connection");
	}
	fe->fd = own; /* the session's from here on */
	err = fe_replay(fe, error);
	if (err)
		return err;
	err = iswi_thread_start(&fe->thread, "isw-fuse", session_thread, fe);
	if (err)
		return iswi_error(error, err, "the FUSE front end's thread: %s", strerror(-err));
	fe->started = true;
	err = ask_again(fe);
	if (err)
		return iswi_error(error, err,
				  "the kernel does not ask again what was not answered: %s",
				  strerror(-err));
	return 0;
}
#endif

static void fe_info(const isw_frontend *frontend, struct isw_frontend_info *info_out)
{
	const struct iswi_fuse *fe = ISWI_CONTAINER(frontend, const struct iswi_fuse, base);

	info_out->size_bytes = fe->size_bytes;
	info_out->requests_max = fe->slots_max;
}

const struct iswi_frontend_ops iswi_fuse_ops = {
	.name = "fuse",
	.start = fe_start,
	.destroy = fe_destroy,
	.info = fe_info,
	.handover = fe_handover,
#if CAN_HAND_OVER
	.prepare = fe_prepare,
	.serve = fe_serve,
#endif
};
