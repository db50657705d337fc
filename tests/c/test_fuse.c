/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The FUSE front end over an engine made for this test: bytes in memory, completions inside
 * submit, from another thread in reverse order, or held back until the test lets them go.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <signal.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "frontend_fixture.h"

#define SECONDS_MAX   60
#define HAMMERS       4
#define HAMMER_ROUNDS 400

/* ------------------------------------------------------------------- helpers */

struct fixture {
	const char *mountpoint;
	char disk[PATH_MAX];
	isw_engine engine;
	isw_frontend *frontend;
};

static int mount_at(struct fixture *f, const char *path, struct isw_error *error)
{
	const struct isw_frontend_config config = {.path = path};

	return isw_frontend_start(&f->engine, "fuse", &config, &f->frontend, error);
}

static void start(struct fixture *f, enum completion completion, uint32_t requests_max)
{
	struct isw_error error = {0};
	int err;

	engine_start(&f->engine, completion, requests_max);
	err = mount_at(f, f->mountpoint, &error);
	if (err)
		fprintf(stderr, "%s\n", error.text);
	CHECK_EQ(err, 0);
	snprintf(f->disk, sizeof(f->disk), "%s/disk", f->mountpoint);
}

static bool is_mounted(const struct fixture *f)
{
	struct stat here, above;
	char parent[PATH_MAX];

	snprintf(parent, sizeof(parent), "%s/..", f->mountpoint);
	CHECK_EQ(stat(f->mountpoint, &here), 0);
	CHECK_EQ(stat(parent, &above), 0);
	return here.st_dev != above.st_dev;
}

static void end(struct fixture *f)
{
	isw_frontend_destroy(f->frontend);
	CHECK(!is_mounted(f));
	engine_stop(&f->engine);
}

static int open_disk(const struct fixture *f, int flags)
{
	int fd = open(f->disk, O_RDWR | O_DIRECT | O_CLOEXEC | flags);

	CHECK(fd >= 0);
	return fd;
}

/*
 * Memory at the given distance from a page's start. Up to 63 pages may be unaligned: see
 * REQUEST_BYTES_MAX in fuse.c.
 */
static char *memory_for(size_t bytes, size_t misaligned)
{
	void *memory;

	CHECK_EQ(posix_memalign(&memory, ISW_PAGE_BYTES, bytes + misaligned), 0);
	return (char *)memory + misaligned;
}

static void memory_free(char *memory)
{
	free(memory - (uintptr_t)memory % ISW_PAGE_BYTES);
}

static char *pattern(size_t bytes, size_t misaligned, unsigned int seed)
{
	char *memory = memory_for(bytes, misaligned);
	size_t i;

	for (i = 0; i < bytes; i++)
		memory[i] = (char)rand_r(&seed);
	return memory;
}

static bool holds(isw_engine *engine, off_t offset, const void *data, size_t bytes)
{
	bool same;

	pthread_mutex_lock(&engine->lock);
	same = memcmp(engine->bytes + offset, data, bytes) == 0;
	pthread_mutex_unlock(&engine->lock);
	return same;
}

/* -------------------------------------------------------------------- tests */

static void test_names_and_attributes(struct fixture *f)
{
	struct statvfs fs;
	struct stat attr;
	char path[PATH_MAX];

	start(f, INLINE, 8);
	CHECK(is_mounted(f));
	CHECK_EQ(stat(f->disk, &attr), 0);
	CHECK_EQ(attr.st_size, SIZE_BYTES);
	CHECK_EQ(attr.st_mode, S_IFREG | 0600);
	CHECK_EQ(attr.st_blksize, ISW_PAGE_BYTES);
	CHECK_EQ(statvfs(f->mountpoint, &fs), 0);
	CHECK_EQ(fs.f_bsize, ISW_PAGE_BYTES);
	snprintf(path, sizeof(path), "%s/other", f->mountpoint);
	CHECK_EQ(stat(path, &attr), -1);
	CHECK_EQ(errno, ENOENT);
	CHECK_EQ(open(path, O_CREAT | O_RDWR, 0600), -1);
	CHECK_EQ(truncate(f->disk, 4096), -1);
	CHECK_EQ(errno, EPERM);
	CHECK_EQ(open(f->disk, O_RDWR | O_TRUNC), -1);
	CHECK_EQ(truncate(f->disk, SIZE_BYTES), 0);
	snprintf(path, sizeof(path), "[ \"$(ls %s)\" = disk ]", f->mountpoint);
	CHECK_EQ(system(path), 0);
	end(f);
}

static void test_bytes_of_every_size(struct fixture *f, enum completion completion)
{
	size_t pages[] = {1, 2, 3, 7, 8, 31, 63, 64, 65, 127, 256, 300, 1000};
	size_t i;
	int fd;

	start(f, completion, 16);
	fd = open_disk(f, 0);
	for (i = 0; i < ISWI_ARRAY_LEN(pages); i++) {
		size_t bytes = pages[i] * ISW_PAGE_BYTES;
		off_t offset = (off_t)(i * 4321 % 8000 * ISW_PAGE_BYTES);
		size_t misaligned = pages[i] < 64 ? 1 + i : 0;
		char *wrote = pattern(bytes, misaligned, (unsigned int)i);
		char *got = memory_for(bytes, misaligned);

		CHECK_EQ(pwrite(fd, wrote, bytes, offset), bytes);
		CHECK_EQ(pread(fd, got, bytes, offset), bytes);
		CHECK(memcmp(wrote, got, bytes) == 0);
		CHECK(holds(&f->engine, offset, wrote, bytes));
		memory_free(wrote);
		memory_free(got);
	}
	/* The kernel really sends large requests, not pages. */
	CHECK(counted(&f->engine, &f->engine.longest_bytes) >= 128u * 1024u);
	close(fd);
	end(f);
}

static void test_borders(struct fixture *f)
{
	static char data[2 * ISW_PAGE_BYTES];
	int fd;

	start(f, INLINE, 8);
	fd = open_disk(f, 0);
	CHECK_EQ(pwrite(fd, data, 512, 0), -1);
	CHECK_EQ(errno, EINVAL);
	CHECK_EQ(pwrite(fd, data, ISW_PAGE_BYTES, 512), -1);
	CHECK_EQ(errno, EINVAL);
	CHECK_EQ(pread(fd, data, 512, 0), -1);
	CHECK_EQ(errno, EINVAL);
	CHECK_EQ(pread(fd, data, sizeof(data), SIZE_BYTES), 0);
	CHECK_EQ(pread(fd, data, sizeof(data), SIZE_BYTES - ISW_PAGE_BYTES), ISW_PAGE_BYTES);
	CHECK_EQ(pwrite(fd, data, sizeof(data), SIZE_BYTES - ISW_PAGE_BYTES), -1);
	CHECK_EQ(errno, ENOSPC);
	engine_fail_with(&f->engine, -EIO);
	CHECK_EQ(pread(fd, data, sizeof(data), 0), -1);
	CHECK_EQ(errno, EIO);
	CHECK_EQ(pwrite(fd, data, sizeof(data), 0), -1);
	CHECK_EQ(errno, EIO);
	CHECK_EQ(fsync(fd), -1);
	engine_fail_with(&f->engine, 0);
	close(fd);
	end(f);
}

/* Without O_DIRECT too: nothing may be kept in the page cache, where it would count twice. */
static void test_nothing_is_cached(struct fixture *f)
{
	char *page = memory_for(ISW_PAGE_BYTES, 0);
	uint64_t before;
	int fd;

	start(f, INLINE, 8);
	fd = open(f->disk, O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	CHECK_EQ(pread(fd, page, ISW_PAGE_BYTES, 0), ISW_PAGE_BYTES);
	before = counted(&f->engine, &f->engine.submitted);
	CHECK_EQ(pread(fd, page, ISW_PAGE_BYTES, 0), ISW_PAGE_BYTES);
	CHECK_EQ(counted(&f->engine, &f->engine.submitted), before + 1);
	page[0] = 'x';
	CHECK_EQ(pwrite(fd, page, ISW_PAGE_BYTES, 0), ISW_PAGE_BYTES);
	CHECK(holds(&f->engine, 0, page, ISW_PAGE_BYTES));
	close(fd);
	memory_free(page);
	end(f);
}

static void test_flush_and_holes(struct fixture *f)
{
	const int keep = FALLOC_FL_KEEP_SIZE;
	static char data[16 * ISW_PAGE_BYTES], zeros[16 * ISW_PAGE_BYTES];
	int fd, fd_sync;

	start(f, REVERSED, 8);
	fd = open_disk(f, 0);
	memset(data, 'x', sizeof(data));
	CHECK_EQ(pwrite(fd, data, sizeof(data), 0), sizeof(data));
	CHECK_EQ(counted(&f->engine, &f->engine.fua_writes), 0);
	CHECK_EQ(counted(&f->engine, &f->engine.flushes), 0);
	CHECK_EQ(fsync(fd), 0);
	CHECK_EQ(fdatasync(fd), 0);
	CHECK_EQ(counted(&f->engine, &f->engine.flushes), 2);

	CHECK_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | keep, 0, 2 * ISW_PAGE_BYTES), 0);
	CHECK_EQ(counted(&f->engine, &f->engine.trims), 1);
	CHECK_EQ(fallocate(fd, FALLOC_FL_ZERO_RANGE | keep, 4 * ISW_PAGE_BYTES, ISW_PAGE_BYTES), 0);
	CHECK_EQ(counted(&f->engine, &f->engine.zeros), 1);
	memset(data, 0, 2 * ISW_PAGE_BYTES);
	memset(data + 4 * ISW_PAGE_BYTES, 0, ISW_PAGE_BYTES);
	CHECK(holds(&f->engine, 0, data, sizeof(data)));
	CHECK_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | keep, 0, SIZE_BYTES), 0);
	CHECK(holds(&f->engine, 0, zeros, sizeof(zeros)));
	CHECK_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | keep, 100, ISW_PAGE_BYTES), -1);
	CHECK_EQ(errno, EINVAL);
	CHECK_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | keep, 0, 100), -1);
	CHECK_EQ(errno, EINVAL);
	CHECK_EQ(fallocate(fd, 0, 0, SIZE_BYTES), 0); /* preallocation: it is all there */
	CHECK_EQ(counted(&f->engine, &f->engine.trims) + counted(&f->engine, &f->engine.zeros), 3);
	CHECK_EQ(fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, ISW_PAGE_BYTES), -1);
	CHECK_EQ(errno, EOPNOTSUPP);

	fd_sync = open_disk(f, O_DSYNC);
	CHECK_EQ(pwrite(fd_sync, data, sizeof(data), 0), sizeof(data));
	CHECK(counted(&f->engine, &f->engine.fua_writes) + counted(&f->engine, &f->engine.flushes) >
	      2);
	close(fd_sync);
	close(fd);
	end(f);
}

struct hammer {
	struct fixture *f;
	unsigned int seed;
	uint64_t first_byte, bytes;
	pthread_t thread;
};

static void *hammer(void *arg)
{
	struct hammer *h = arg;
	char *mirror = memory_for(h->bytes, 0), *buf = memory_for(MIB, 0);
	int fd = open_disk(h->f, 0), round;

	memset(mirror, 0, h->bytes);
	for (round = 0; round < HAMMER_ROUNDS; round++) {
		size_t bytes = (1u + (unsigned int)rand_r(&h->seed) % 100) * ISW_PAGE_BYTES;
		uint64_t at = (uint64_t)rand_r(&h->seed) % (h->bytes - bytes) / ISW_PAGE_BYTES *
			      ISW_PAGE_BYTES;

		if (rand_r(&h->seed) % 2) {
			memset(mirror + at, rand_r(&h->seed), bytes);
			CHECK_EQ(pwrite(fd, mirror + at, bytes, (off_t)(h->first_byte + at)),
				 bytes);
		} else {
			CHECK_EQ(pread(fd, buf, bytes, (off_t)(h->first_byte + at)), bytes);
			CHECK(memcmp(mirror + at, buf, bytes) == 0);
		}
	}
	close(fd);
	memory_free(mirror);
	memory_free(buf);
	return NULL;
}

/* requests_max below what the kernel sends: our thread waits for buffers and loses nothing. */
static void test_many_threads(struct fixture *f, enum completion completion, uint32_t requests_max)
{
	struct hammer hammers[HAMMERS];
	int i;

	start(f, completion, requests_max);
	for (i = 0; i < HAMMERS; i++) {
		hammers[i] = (struct hammer){.f = f,
					     .seed = (unsigned int)i + 1,
					     .first_byte = (uint64_t)i * (SIZE_BYTES / HAMMERS),
					     .bytes = SIZE_BYTES / HAMMERS};
		CHECK_EQ(pthread_create(&hammers[i].thread, NULL, hammer, &hammers[i]), 0);
	}
	for (i = 0; i < HAMMERS; i++)
		pthread_join(hammers[i].thread, NULL);
	end(f);
}

struct reader {
	int fd;
	pthread_t thread;
};

static void *read_a_page(void *arg)
{
	struct reader *reader = arg;
	char *page = memory_for(ISW_PAGE_BYTES, 0);
	intptr_t got = pread(reader->fd, page, ISW_PAGE_BYTES, 0);

	memory_free(page);
	return (void *)got;
}

static void *destroy(void *arg)
{
	struct fixture *f = arg;
	bool released;

	isw_frontend_destroy(f->frontend);
	pthread_mutex_lock(&f->engine.lock);
	released = f->engine.completion != HELD;
	pthread_mutex_unlock(&f->engine.lock);
	return (void *)(intptr_t)released;
}

static void wait_submitted(isw_engine *engine, uint32_t many)
{
	pthread_mutex_lock(&engine->lock);
	while (engine->submitted < many)
		pthread_cond_wait(&engine->changed, &engine->lock);
	pthread_mutex_unlock(&engine->lock);
}

/*
 * More readers than buffers, none answered: destroy must not return before the engine has ended
 * what it holds, those get their bytes, and the ones still queued in the kernel get an error.
 */
static void test_destroy_with_requests_in_flight(struct fixture *f)
{
	struct reader readers[6];
	pthread_t destroyer;
	intptr_t served = 0;
	void *result;
	int i;

	start(f, HELD, 3);
	for (i = 0; i < 6; i++)
		readers[i].fd = open_disk(f, 0);
	for (i = 0; i < 6; i++)
		CHECK_EQ(pthread_create(&readers[i].thread, NULL, read_a_page, &readers[i]), 0);
	wait_submitted(&f->engine, 3);
	CHECK_EQ(pthread_create(&destroyer, NULL, destroy, f), 0);
	usleep(50000); /* lets destroy get as far as it can; the checks hold without it */
	engine_complete(&f->engine, REVERSED);
	pthread_join(destroyer, &result);
	CHECK_EQ((intptr_t)result, true);
	for (i = 0; i < 6; i++) {
		pthread_join(readers[i].thread, &result);
		close(readers[i].fd);
		served += (intptr_t)result == ISW_PAGE_BYTES;
	}
	CHECK(served >= 3);
	CHECK(!is_mounted(f));
	engine_stop(&f->engine);
}

/* As with a loop device still attached: the mount goes, the open file answers errors. */
static void test_destroy_while_open(struct fixture *f)
{
	char *page = memory_for(ISW_PAGE_BYTES, 0);
	int fd;

	start(f, REVERSED, 4);
	fd = open_disk(f, 0);
	CHECK_EQ(pread(fd, page, ISW_PAGE_BYTES, 0), ISW_PAGE_BYTES);
	end(f);
	CHECK_EQ(pread(fd, page, ISW_PAGE_BYTES, 0), -1);
	close(fd);
	memory_free(page);
}

static void test_unmounted_by_somebody_else(struct fixture *f)
{
	start(f, INLINE, 4);
	CHECK_EQ(umount2(f->mountpoint, 0), 0);
	pthread_mutex_lock(&f->engine.lock);
	while (!f->engine.down)
		pthread_cond_wait(&f->engine.changed, &f->engine.lock);
	CHECK(f->engine.down_error < 0);
	pthread_mutex_unlock(&f->engine.lock);
	end(f);
}

static void test_refusals(struct fixture *f)
{
	struct isw_error error = {0};
	char path[PATH_MAX];
	int err;

	engine_start(&f->engine, INLINE, 4);
	snprintf(path, sizeof(path), "%s/absent", f->mountpoint);
	err = mount_at(f, path, &error);
	if (err == -ENOSYS && strstr(error.text, "libfuse3"))
		SKIP("needs a build with libfuse3");
	CHECK_EQ(err, -ENOENT);
	CHECK(strstr(error.text, path) != NULL);
	CHECK(f->frontend == NULL);
	CHECK_EQ(mount_at(f, "/dev/null", &error), -ENOTDIR);
	CHECK_EQ(mount_at(f, "/dev/null", NULL), -ENOTDIR);
	CHECK(!f->engine.down);
	engine_stop(&f->engine);
}

/* Of this thread. */
static void set_capabilities(const struct __user_cap_data_struct *data)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};

	CHECK_EQ(syscall(SYS_capset, &header, data), 0);
}

static void test_root_without_the_capability_is_told_so(struct fixture *f)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct had[_LINUX_CAPABILITY_U32S_3];
	struct __user_cap_data_struct less[_LINUX_CAPABILITY_U32S_3];
	struct isw_error error = {0};

	CHECK_EQ(syscall(SYS_capget, &header, had), 0);
	memcpy(less, had, sizeof(less));
	less[0].effective &= ~CAP_TO_MASK(CAP_SYS_ADMIN);
	engine_start(&f->engine, INLINE, 4);
	set_capabilities(less);
	CHECK_EQ(mount_at(f, f->mountpoint, &error), -EPERM);
	set_capabilities(had);
	/* Whole: nobody reads what a library has written to standard error. */
	CHECK(strstr(error.text, f->mountpoint) != NULL);
	CHECK(strstr(error.text, strerror(EPERM)) != NULL);
	CHECK(strstr(error.text, "above") == NULL);
	CHECK(f->frontend == NULL);
	engine_stop(&f->engine);
}

static int run_tests(const char *mountpoint)
{
	static struct fixture f;

	f.mountpoint = mountpoint;
	test_refusals(&f);
	test_root_without_the_capability_is_told_so(&f);
	test_names_and_attributes(&f);
	test_bytes_of_every_size(&f, INLINE);
	test_bytes_of_every_size(&f, REVERSED);
	test_borders(&f);
	test_nothing_is_cached(&f);
	test_flush_and_holes(&f);
	test_many_threads(&f, INLINE, 64);
	test_many_threads(&f, REVERSED, 64);
	test_many_threads(&f, REVERSED, 2);
	test_many_threads(&f, REVERSED, 1);
	test_destroy_with_requests_in_flight(&f);
	test_destroy_while_open(&f);
	test_unmounted_by_somebody_else(&f);
	return 0;
}

/*
 * The tests run in a child: when one fails with a request unanswered, threads of the child wait
 * in the kernel for a reply that only the child could give. The forced unmount ends that.
 */
int main(void)
{
	char mountpoint[] = "/tmp/isw-test-fuse-XXXXXX";
	int status = 0, ticks;
	pid_t child;

	if (geteuid() != 0)
		SKIP("needs root (mount)");
	if (access("/dev/fuse", R_OK | W_OK) != 0)
		SKIP("needs /dev/fuse");
	CHECK(mkdtemp(mountpoint) != NULL);
	child = fork();
	CHECK(child >= 0);
	if (child == 0)
		exit(run_tests(mountpoint));
	for (ticks = 0; ticks < SECONDS_MAX * 20; ticks++) {
		if (waitpid(child, &status, WNOHANG) == child)
			break;
		usleep(50000);
	}
	if (ticks == SECONDS_MAX * 20) {
		fprintf(stderr, "not done after %d seconds\n", SECONDS_MAX);
		kill(child, SIGKILL);
	}
	while (umount2(mountpoint, MNT_FORCE) == 0 || umount2(mountpoint, MNT_DETACH) == 0)
		;
	if (ticks == SECONDS_MAX * 20)
		waitpid(child, &status, 0);
	rmdir(mountpoint);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
